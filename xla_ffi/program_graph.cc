#include "xla_ffi/program_graph.h"

#include <algorithm>
#include <span>
#include <unordered_map>
#include <utility>

#include "xla_ffi/order.h"

namespace dynaflow::cuda {
namespace {

DevicePtr ToDevice(const std::byte* p) { return reinterpret_cast<DevicePtr>(p); }

// What the command does to its flag.
void AppendMemOps(const Command& c, std::vector<MemOp>& ops) {
  const auto append = [&](MemOpType type, uint32_t value) {
    MemOp op{};
    op.on = {type, c.writes[0].offset, {value}, /*flags: or kWaitValueGeq=*/0, 0};
    ops.push_back(op);
  };
  if (c.kind == CommandKind::kSignal) {
    append(kWriteValue32, 1);
  } else {
    append(kWaitValue32, 1);
    append(kWriteValue32, 0);
  }
}

// Which commands are flags beside which nothing is computed, on any timing: a waiting kernel may want the
// place of another one on its multiprocessor.
std::vector<bool> FlagsAlone(const Program& program, const Order& order) {
  std::vector<bool> alone(program.commands.size());
  for (size_t i = 0; i < program.commands.size(); ++i) {
    const Command& c = program.commands[i];
    alone[i] = IsFlag(c) && program.streams[c.stream].sm_budget == 0;
    for (size_t k = 0; k < program.commands.size() && alone[i]; ++k) {
      alone[i] = !Computes(program.commands[k]) || order.Ordered(i, k);
    }
  }
  return alone;
}

}  // namespace

Memcpy3D CopyOf(const Command& c, DevicePtr dst, DevicePtr src) {
  Memcpy3D copy{};
  copy.src_type = copy.dst_type = kMemoryDevice;
  copy.src_device = src;
  copy.dst_device = dst;
  copy.src_pitch = c.rows.read_pitch;  // of no meaning for a single row
  copy.dst_pitch = c.rows.write_pitch;
  copy.width = RowBytes(c);
  copy.height = c.rows.count;
  copy.depth = 1;
  return copy;
}

Result<ProgramGraph> ProgramGraph::Build(const Driver& driver, Context context,
                                         std::shared_ptr<const ExchangeKernels> kernels,
                                         const Program& program, const std::vector<Graph>& partitions,
                                         const Call& call, Stopwatch* stopwatch) {
  ProgramGraph result;
  result.driver_ = &driver;
  result.context_ = context;
  result.kernels_ = std::move(kernels);
  Graph raw = nullptr;
  DYNAFLOW_CUDA(driver, GraphCreate, &raw, 0);
  result.graph_ = OwnedGraph(raw, {&driver});

  std::vector<bool> by_kernel(program.commands.size());  // flags that are, rather than by the driver
  const Order order(program);
  if (result.kernels_) by_kernel = FlagsAlone(program, order);

  // What the next node of each stream has to follow, and what each event stands for: nodes take the place of
  // the moments in time that streams and events are about.
  using Nodes = std::vector<GraphNode>;
  std::vector<Nodes> tails(program.streams.size()), events(program.num_events);

  // An edge that others imply is not free: where a node follows two others, the driver takes them for
  // branches, and a chain that changes streams would take 5 us longer for each change (on an H200).
  std::unordered_map<GraphNode, size_t> last;  // the last command of each node
  const auto latest = [&](const Nodes& all) {
    Nodes found;
    for (GraphNode node : all) {
      const bool implied = std::any_of(all.begin(), all.end(), [&](GraphNode other) {
        return last.contains(node) && last.contains(other) && order.Before(last.at(node), last.at(other));
      });
      if (!implied) found.push_back(node);
    }
    return found;
  };

  // Of a stream whose next node has to follow just one moment that is recorded: that moment's event.
  std::vector<Event> moments(program.streams.size());
  const auto record = [&](Event event, Nodes& after) -> Status {
    GraphNode node = nullptr;
    DYNAFLOW_CUDA(driver, AddEventRecordNode, &node, raw, after.data(), after.size(), event);
    after = {node};
    return {};
  };
  if (stopwatch) {
    Nodes start;
    DYNAFLOW_RETURN_IF_ERROR(record(stopwatch->start(), start));
    tails.assign(tails.size(), start);
    moments.assign(moments.size(), stopwatch->start());
  }
  size_t next = 0;
  for (size_t i = 0; i < program.commands.size(); i = next) {
    next = i + 1;
    const Command& c = program.commands[i];
    const int priority = program.streams[c.stream].priority;
    Nodes& tail = tails[c.stream];
    GraphNode node = nullptr;
    Status added;
    if (stopwatch && Stopwatch::Times(c) && !moments[c.stream]) {
      DYNAFLOW_RETURN_IF_ERROR(
          record(stopwatch->before(i), tail).Within([&] { return Describe(program, i); }));
      moments[c.stream] = stopwatch->before(i);
    }
    switch (c.kind) {
      case CommandKind::kLaunch:
        added = driver.Check(driver.AddChildNode(&node, raw, tail.data(), tail.size(), partitions[i]),
                             "AddChildNode");
        break;
      case CommandKind::kCopy: {
        const Range &from = c.reads[0], &to = c.writes[0];
        if (to.bytes == 0) break;
        const bool moves = from.space != Space::kMemory || to.space != Space::kMemory;
        if (moves && c.rows.count > 1) {
          added = Unimplemented("the driver gives no new addresses to a copy of several rows");
          break;
        }
        const DevicePtr dst = ToDevice(Resolve(to, call)), src = ToDevice(Resolve(from, call));
        const Memcpy3D copy = CopyOf(c, dst, src);
        added = driver.Check(driver.AddMemcpyNode(&node, raw, tail.data(), tail.size(), &copy, context),
                             "AddMemcpyNode");
        if (moves) result.moving_.push_back({i, node, dst, src});
        break;
      }
      case CommandKind::kRecord:
        events[c.target] = tail;
        break;
      case CommandKind::kWait: {
        Nodes all = tail;
        for (GraphNode done : events[c.target]) {
          if (std::find(tail.begin(), tail.end(), done) == tail.end()) all.push_back(done);
        }
        all = latest(all);
        if (all == tail) break;
        tail = std::move(all);
        moments[c.stream] = nullptr;
        break;
      }
      case CommandKind::kSignal:
      case CommandKind::kAwait: {
        // Each node costs time of its own, so neighbours become one.
        const auto is_neighbour = [&](size_t k) {
          return k < program.commands.size() && IsFlag(program.commands[k]) &&
                 program.commands[k].stream == c.stream && by_kernel[k] == by_kernel[i];
        };
        if (by_kernel[i]) {
          while (is_neighbour(next)) ++next;
          const std::span flags(&program.commands[i], next - i);
          const bool summed = next < program.commands.size() && program.commands[next].stream == c.stream &&
                              IsSum(program.commands[next]);
          const size_t with_sum = summed ? ExchangeKernels::FlagsAhead(flags) : 0;
          const size_t alone = std::min(flags.size() - with_sum, kMaxFlags);
          next = alone ? i + alone : next + 1;
          auto made = alone ? result.kernels_->AddFlags(raw, tail, flags.first(alone))
                            : result.kernels_->AddSum(raw, tail, flags, program.commands[next - 1], priority);
          added = made.status();
          if (added.ok()) node = *made;
          break;
        }
        std::vector<MemOp> ops;
        AppendMemOps(c, ops);
        while (is_neighbour(next) && ops.size() + 2 <= kMaxMemOps)
          AppendMemOps(program.commands[next++], ops);
        const MemOpNodeParams params{context, static_cast<unsigned>(ops.size()), ops.data(), 0};
        added =
            driver.Check(driver.AddMemOpNode(&node, raw, tail.data(), tail.size(), &params), "AddMemOpNode");
        break;
      }
      case CommandKind::kSum: {
        auto made = result.kernels_->AddSum(raw, tail, {}, c, priority);
        added = made.status();
        if (added.ok()) node = *made;
        break;
      }
    }
    DYNAFLOW_RETURN_IF_ERROR(added.Within([&] { return Describe(program, i); }));
    if (!node) continue;
    tail = {node};
    last[node] = next - 1;
    if (!stopwatch) continue;
    const Event end = stopwatch->after(next - 1);
    DYNAFLOW_RETURN_IF_ERROR(record(end, tail).Within([&] { return Describe(program, i); }));
    last[tail[0]] = next - 1;
    for (size_t k = i; k < next; ++k) stopwatch->Set(k, moments[c.stream], end);
    moments[c.stream] = end;
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
    const Memcpy3D copy = CopyOf(c, dst, src);
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
