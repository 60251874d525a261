#include "xla_ffi/program_graph.h"

#include <algorithm>

namespace dynaflow::cuda {
namespace {

DevicePtr ToDevice(const std::byte* p) { return reinterpret_cast<DevicePtr>(p); }

Memcpy3D FlatCopy(DevicePtr dst, DevicePtr src, size_t bytes) {
  Memcpy3D copy{};
  copy.src_type = copy.dst_type = kMemoryDevice;
  copy.src_device = src;
  copy.dst_device = dst;
  copy.width = bytes;
  copy.height = copy.depth = 1;
  return copy;
}

}  // namespace

Result<ProgramGraph> ProgramGraph::Build(const Driver& driver, Context context, const Program& program,
                                         const std::vector<Graph>& partitions, const Call& call) {
  ProgramGraph result;
  result.driver_ = &driver;
  result.context_ = context;
  Graph raw = nullptr;
  DYNAFLOW_CUDA(driver, GraphCreate, &raw, 0);
  result.graph_ = OwnedGraph(raw, {&driver});

  // What the next node of each stream has to follow, and what each event stands for: nodes take the place of
  // the moments in time that streams and events are about.
  using Nodes = std::vector<GraphNode>;
  std::vector<Nodes> tails(program.streams.size()), events(program.num_events);
  for (size_t i = 0; i < program.commands.size(); ++i) {
    const Command& c = program.commands[i];
    Nodes& tail = tails[c.stream];
    GraphNode node = nullptr;
    Status added;
    switch (c.kind) {
      case CommandKind::kLaunch:
        added = driver.Check(driver.AddChildNode(&node, raw, tail.data(), tail.size(), partitions[i]),
                             "AddChildNode");
        break;
      case CommandKind::kCopy: {
        const Range &from = c.reads[0], &to = c.writes[0];
        if (to.bytes == 0) break;
        const DevicePtr dst = ToDevice(Resolve(to, call)), src = ToDevice(Resolve(from, call));
        const Memcpy3D copy = FlatCopy(dst, src, to.bytes);
        added = driver.Check(driver.AddMemcpyNode(&node, raw, tail.data(), tail.size(), &copy, context),
                             "AddMemcpyNode");
        if (from.space != Space::kMemory || to.space != Space::kMemory) {
          result.moving_.push_back({i, node, dst, src});
        }
        break;
      }
      case CommandKind::kRecord:
        events[c.target] = tail;
        break;
      case CommandKind::kWait:
        for (GraphNode done : events[c.target]) {
          if (std::find(tail.begin(), tail.end(), done) == tail.end()) tail.push_back(done);
        }
        break;
    }
    DYNAFLOW_RETURN_IF_ERROR(added.Within([&] { return Describe(program, i); }));
    if (node) tail = {node};
  }
  GraphExec exec = nullptr;
  DYNAFLOW_CUDA(driver, GraphInstantiate, &exec, raw, 0);
  result.exec_ = OwnedGraphExec(exec, {&driver});
  return result;
}

Status ProgramGraph::Launch(const Program& program, const Call& call, Stream stream) {
  for (MovingCopy& m : moving_) {
    const Command& c = program.commands[m.command];
    const DevicePtr dst = ToDevice(Resolve(c.writes[0], call)), src = ToDevice(Resolve(c.reads[0], call));
    if (dst == m.dst && src == m.src) continue;
    const Memcpy3D copy = FlatCopy(dst, src, c.writes[0].bytes);
    DYNAFLOW_RETURN_IF_ERROR(
        driver_
            ->Check(driver_->GraphExecSetMemcpy(exec_.get(), m.node, &copy, context_), "GraphExecSetMemcpy")
            .Within([&] { return Describe(program, m.command); }));
    m.dst = dst;
    m.src = src;
  }
  DYNAFLOW_CUDA(*driver_, GraphLaunch, exec_.get(), stream);
  return {};
}

}  // namespace dynaflow::cuda
