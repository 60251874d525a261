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

// Puts a graph together, command by command. Nodes take the place of the moments in time that streams and
// events are about.
class ProgramGraph::Builder {
 public:
  Builder(const Driver& driver, Context context, std::shared_ptr<const ExchangeKernels> kernels,
          const Program& program, const std::vector<Graph>& partitions, const Call& call,
          Stopwatch* stopwatch)
      : driver_(driver),
        program_(program),
        partitions_(partitions),
        call_(call),
        stopwatch_(stopwatch),
        order_(program),
        by_kernel_(kernels ? FlagsAlone(program, order_) : std::vector<bool>(program.commands.size())),
        tails_(program.streams.size()),
        events_(program.num_events),
        moments_(program.streams.size()) {
    result_.driver_ = &driver;
    result_.context_ = context;
    result_.kernels_ = std::move(kernels);
  }

  Result<ProgramGraph> Build() {
    DYNAFLOW_RETURN_IF_ERROR(Begin());
    for (size_t i = 0; i < program_.commands.size();) {
      size_t next = i + 1;
      DYNAFLOW_RETURN_IF_ERROR(Add(i, next).Within([&] { return Describe(program_, i); }));
      i = next;
    }
    GraphExec exec = nullptr;
    DYNAFLOW_CUDA(driver_, GraphInstantiate, &exec, graph_, 0);
    result_.exec_ = OwnedGraphExec(exec, {&driver_});
    return std::move(result_);
  }

 private:
  using Nodes = std::vector<GraphNode>;
  static constexpr GraphNode kNoNode = nullptr;

  Status Begin() {
    DYNAFLOW_CUDA(driver_, GraphCreate, &graph_, 0);
    result_.graph_ = OwnedGraph(graph_, {&driver_});
    if (!stopwatch_) return {};
    Nodes start;
    DYNAFLOW_RETURN_IF_ERROR(Record(stopwatch_->start(), start));
    tails_.assign(tails_.size(), start);
    moments_.assign(moments_.size(), stopwatch_->start());
    return {};
  }

  // Adds command `i`, with those behind it that become one node with it. `next`: the first one that does not.
  Status Add(size_t i, size_t& next) {
    const Command& c = program_.commands[i];
    Nodes& tail = tails_[c.stream];
    if (stopwatch_ && Stopwatch::Times(c) && !moments_[c.stream]) {
      DYNAFLOW_RETURN_IF_ERROR(Record(stopwatch_->before(i), tail));
      moments_[c.stream] = stopwatch_->before(i);
    }
    DYNAFLOW_ASSIGN(const GraphNode node, AddNode(i, next));
    if (!node) return {};
    tail = {node};
    last_[node] = next - 1;
    return stopwatch_ ? RecordEnd(i, next) : Status();
  }

  // The node of a command; none for one that does nothing, or is about the order of others only.
  Result<GraphNode> AddNode(size_t i, size_t& next) {
    const Command& c = program_.commands[i];
    switch (c.kind) {
      case CommandKind::kLaunch:
        return AddLaunch(i);
      case CommandKind::kCopy:
        return AddCopy(i);
      case CommandKind::kRecord:
        events_[c.target] = tails_[c.stream];
        return kNoNode;
      case CommandKind::kWait:
        Wait(c);
        return kNoNode;
      case CommandKind::kSignal:
      case CommandKind::kAwait:
        return by_kernel_[i] ? AddFlagsByKernel(i, next) : AddFlags(i, next);
      case CommandKind::kSum:
        return result_.kernels_->AddSum(graph_, tails_[c.stream], {}, c, PriorityOf(c));
    }
    return kNoNode;
  }

  Result<GraphNode> AddLaunch(size_t i) {
    const Nodes& after = tails_[program_.commands[i].stream];
    GraphNode node = nullptr;
    DYNAFLOW_CUDA(driver_, AddChildNode, &node, graph_, after.data(), after.size(), partitions_[i]);
    return node;
  }

  Result<GraphNode> AddCopy(size_t i) {
    const Command& c = program_.commands[i];
    const Range &from = c.reads[0], &to = c.writes[0];
    if (to.bytes == 0) return kNoNode;
    const bool moves = from.space != Space::kMemory || to.space != Space::kMemory;
    if (moves && c.rows.count > 1)
      return Unimplemented("the driver gives no new addresses to a copy of several rows");
    const Nodes& after = tails_[c.stream];
    const DevicePtr dst = ToDevice(Resolve(to, call_)), src = ToDevice(Resolve(from, call_));
    const Memcpy3D copy = CopyOf(c, dst, src);
    GraphNode node = nullptr;
    DYNAFLOW_CUDA(driver_, AddMemcpyNode, &node, graph_, after.data(), after.size(), &copy, result_.context_);
    if (moves) result_.moving_.push_back({i, node, dst, src});
    return node;
  }

  void Wait(const Command& c) {
    Nodes& tail = tails_[c.stream];
    Nodes all = tail;
    for (GraphNode done : events_[c.target]) {
      if (std::find(tail.begin(), tail.end(), done) == tail.end()) all.push_back(done);
    }
    all = Latest(all);
    if (all == tail) return;
    tail = std::move(all);
    moments_[c.stream] = nullptr;
  }

  // An edge that others imply is not free: where a node follows two others, the driver takes them for
  // branches, and a chain that changes streams would take 5 us longer for each change (on an H200).
  Nodes Latest(const Nodes& all) const {
    Nodes found;
    for (GraphNode node : all) {
      const bool implied = std::any_of(all.begin(), all.end(), [&](GraphNode other) {
        return last_.contains(node) && last_.contains(other) &&
               order_.Before(last_.at(node), last_.at(other));
      });
      if (!implied) found.push_back(node);
    }
    return found;
  }

  // Each node costs time of its own, so neighbours become one.
  bool IsNeighbour(size_t i, size_t k) const {
    const auto& commands = program_.commands;
    return k < commands.size() && IsFlag(commands[k]) && commands[k].stream == commands[i].stream &&
           by_kernel_[k] == by_kernel_[i];
  }

  // The flags from here on by a kernel: by that of the sum behind them, as far as it can do them.
  Result<GraphNode> AddFlagsByKernel(size_t i, size_t& next) {
    const auto& commands = program_.commands;
    const Nodes& after = tails_[commands[i].stream];
    while (IsNeighbour(i, next)) ++next;
    const std::span flags(&commands[i], next - i);
    const bool summed =
        next < commands.size() && commands[next].stream == commands[i].stream && IsSum(commands[next]);
    const size_t with_sum = summed ? ExchangeKernels::FlagsAhead(flags) : 0;
    const size_t in_own_node = std::min(flags.size() - with_sum, kMaxFlags);
    if (in_own_node) {
      next = i + in_own_node;
      return result_.kernels_->AddFlags(graph_, after, flags.first(in_own_node));
    }
    const Command& sum = commands[next++];
    return result_.kernels_->AddSum(graph_, after, flags, sum, PriorityOf(sum));
  }

  // The flags from here on by the driver's operations.
  Result<GraphNode> AddFlags(size_t i, size_t& next) {
    const Nodes& after = tails_[program_.commands[i].stream];
    std::vector<MemOp> ops;
    AppendMemOps(program_.commands[i], ops);
    while (IsNeighbour(i, next) && ops.size() + 2 <= kMaxMemOps) AppendMemOps(program_.commands[next++], ops);
    const MemOpNodeParams params{result_.context_, static_cast<unsigned>(ops.size()), ops.data(), 0};
    GraphNode node = nullptr;
    DYNAFLOW_CUDA(driver_, AddMemOpNode, &node, graph_, after.data(), after.size(), &params);
    return node;
  }

  Status Record(Event event, Nodes& after) {
    GraphNode node = nullptr;
    DYNAFLOW_CUDA(driver_, AddEventRecordNode, &node, graph_, after.data(), after.size(), event);
    after = {node};
    return {};
  }

  // Records the end of the node that is commands `i` to `next`, which share its time.
  Status RecordEnd(size_t i, size_t next) {
    const uint32_t stream = program_.commands[i].stream;
    const Event end = stopwatch_->after(next - 1);
    DYNAFLOW_RETURN_IF_ERROR(Record(end, tails_[stream]));
    last_[tails_[stream][0]] = next - 1;
    for (size_t k = i; k < next; ++k) stopwatch_->Set(k, moments_[stream], end);
    moments_[stream] = end;
    return {};
  }

  int PriorityOf(const Command& c) const { return program_.streams[c.stream].priority; }

  const Driver& driver_;
  const Program& program_;
  const std::vector<Graph>& partitions_;
  const Call& call_;
  Stopwatch* const stopwatch_;
  const Order order_;
  const std::vector<bool> by_kernel_;  // flags that are, rather than by the driver

  ProgramGraph result_;
  Graph graph_ = nullptr;                       // its
  std::vector<Nodes> tails_;                    // what the next node of each stream has to follow
  std::vector<Nodes> events_;                   // what each event stands for
  std::unordered_map<GraphNode, size_t> last_;  // the last command of each node
  // Of a stream whose next node has to follow just one moment that is recorded: that moment's event.
  std::vector<Event> moments_;
};

Result<ProgramGraph> ProgramGraph::Build(const Driver& driver, Context context,
                                         std::shared_ptr<const ExchangeKernels> kernels,
                                         const Program& program, const std::vector<Graph>& partitions,
                                         const Call& call, Stopwatch* stopwatch) {
  return Builder(driver, context, std::move(kernels), program, partitions, call, stopwatch).Build();
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
