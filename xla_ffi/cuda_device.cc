#include "xla_ffi/cuda_device.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "xla_ffi/cuda_graph.h"
#include "xla_ffi/green_context.h"

namespace dynaflow {
namespace {

using cuda::OwnedEvent;

constexpr int kFirst = -1000;  // a priority; the driver takes the highest that there is

// Which function for a command the driver lacks; empty if none.
std::string Missing(const cuda::Driver& driver, const Command& c) {
  const auto missing = [](const char* function, const char* version) {
    return StrCat(function, ", which this CUDA driver lacks: ", version, " or later has it");
  };
  if (IsFlag(c)) {
    if (!driver.StreamWriteValue) return missing("cuStreamWriteValue32_v2", "11.7");
    if (!driver.StreamWaitValue) return missing("cuStreamWaitValue32_v2", "11.7");
    if (!driver.AddMemOpNode) return missing("cuGraphAddBatchMemOpNode", "11.7");
  }
  if (IsSum(c) && !driver.AddKernelNode) return missing("cuGraphAddKernelNode_v2", "12.0");
  return {};
}

// Where an error is not one command's own: the operators that may have caused it.
std::string Suspects(const Program& program) {
  constexpr size_t kShown = 8;
  std::vector<std::string> names;
  for (const Command& c : program.commands) {
    if (IsEvent(c) || std::find(names.begin(), names.end(), c.name) != names.end()) continue;
    names.push_back(c.name);
  }
  std::string list;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) list += StrCat(i ? ", '" : "'", names[i], "'");
  if (names.size() > kShown) list += StrCat(" and ", names.size() - kShown, " more");
  return list;
}

}  // namespace

// The temporaries of XLA's kernels lie in the private pool, in no range that a program could name, and
// partitions that were captured one after the other may have the same ones. Within a program, whoever
// captures them sees to it that those which run at once have pools of their own; different programs take
// turns, by this.
struct CudaDevice::DeviceTurn {
  std::mutex mutex;  // held while a run is enqueued, so that no other forks before it has joined
  std::shared_ptr<OwnedEvent> done;  // the end of the last run, of whichever program
  cuda::Stream stream = nullptr;     // that it is recorded on
};

// One for all programs of a device, for as long as there are any.
std::shared_ptr<CudaDevice::DeviceTurn> CudaDevice::TurnOf(const cuda::Driver& driver, int ordinal) {
  static std::mutex mutex;
  static auto& turns = *new std::map<std::pair<const cuda::Driver*, int>, std::weak_ptr<DeviceTurn>>;
  std::lock_guard lock(mutex);
  std::weak_ptr<DeviceTurn>& entry = turns[{&driver, ordinal}];
  std::shared_ptr<DeviceTurn> turn = entry.lock();
  if (!turn) entry = turn = std::make_shared<DeviceTurn>();
  return turn;
}

Result<std::unique_ptr<Device>> CudaDevice::Create(const cuda::Driver& driver, std::vector<int> ordinals,
                                                   const Program& program,
                                                   std::vector<std::shared_ptr<const Capture>> captures,
                                                   const CudaOptions& options) {
  const std::string where = StrCat("program '", program.name, "'");
  if (ordinals.size() != program.num_devices) {
    return InvalidArgument(where, " spans ", program.num_devices, " devices, but ", ordinals.size(),
                           " were given");
  }
  if (captures.size() != program.partitions.size()) {
    return InvalidArgument(where, " has ", program.partitions.size(), " partitions, but ", captures.size(),
                           " captures were given");
  }
  for (size_t i = 0; i < program.streams.size(); ++i) {
    if (program.streams[i].device != 0) return Unimplemented(where, ": stream ", i, " is on another device");
  }
  for (size_t i = 0; i < program.commands.size(); ++i) {
    const std::string missing = Missing(driver, program.commands[i]);
    if (!missing.empty()) {
      return Unimplemented(where, ": ", Describe(program, i), " needs ", missing);
    }
  }
  std::unique_ptr<CudaDevice> device(new CudaDevice(driver, options));
  device->captures_ = std::move(captures);
  DYNAFLOW_RETURN_IF_ERROR(device->Prepare(ordinals, program).Within([&] { return where; }));
  return std::unique_ptr<Device>(std::move(device));
}

CudaDevice::~CudaDevice() {
  // What still runs uses the captures' kernels and the pool, which are about to go.
  if (!has_run_) return;
  const cuda::ScopedContext scope(driver_, contexts_[0].get());
  driver_.EventSynchronize(done_->get());
}

Status CudaDevice::Prepare(const std::vector<int>& ordinals, const Program& program) {
  for (int ordinal : ordinals) {
    if (ordinal == kElsewhere) {
      contexts_.emplace_back();
      continue;
    }
    DYNAFLOW_ASSIGN(auto context, cuda::PrimaryContext::Retain(driver_, ordinal));
    contexts_.push_back(std::move(context));
  }
  const cuda::ScopedContext scope(driver_, contexts_[0].get());
  DYNAFLOW_RETURN_IF_ERROR(scope.status());
  DYNAFLOW_RETURN_IF_ERROR(CreateStreams(program));
  DYNAFLOW_RETURN_IF_ERROR(ConnectPeers(program));
  DYNAFLOW_ASSIGN(fork_, cuda::MakeEvent(driver_, cuda::kEventDisableTiming));
  DYNAFLOW_ASSIGN(OwnedEvent done, cuda::MakeEvent(driver_, cuda::kEventDisableTiming));
  done_ = std::make_shared<OwnedEvent>(std::move(done));
  turn_ = TurnOf(driver_, ordinals[0]);
  if (options_.timed) {
    DYNAFLOW_ASSIGN(stopwatch_, cuda::Stopwatch::Create(driver_, program));
  }
  DYNAFLOW_RETURN_IF_ERROR(PreparePartitions(program));
  if (!options_.one_graph) why_not_one_graph_ = "not wanted";
  if (options_.blocking) why_not_one_graph_ = "blocking";
  DYNAFLOW_RETURN_IF_ERROR(LoadKernels(program));
  return why_not_one_graph_.empty() ? Status() : InstantiatePartitions(program);
}

Status CudaDevice::CreateStreams(const Program& program) {
  std::vector<unsigned> budgets;
  for (const Stream& s : program.streams) {
    if (s.sm_budget) budgets.push_back(s.sm_budget);
  }
  DYNAFLOW_ASSIGN(green_contexts_, cuda::ShareOutSms(driver_, contexts_[0].device(), budgets));

  size_t next_green = 0;
  for (const Stream& s : program.streams) {
    cuda::Stream stream = nullptr;
    // Non-blocking: no ordering against the legacy default stream, which other libraries use.
    if (s.sm_budget) {
      DYNAFLOW_CUDA(driver_, GreenStreamCreate, &stream, green_contexts_[next_green++].get(),
                    cuda::kStreamNonBlocking, s.priority);
    } else {
      DYNAFLOW_CUDA(driver_, StreamCreate, &stream, cuda::kStreamNonBlocking, s.priority);
    }
    streams_.emplace_back(stream, cuda::Destroy<&cuda::Driver::StreamDestroy>{&driver_});
  }
  if (std::any_of(program.commands.begin(), program.commands.end(),
                  [](const Command& c) { return c.kind == CommandKind::kAwait; })) {
    // Made now, since there may be nothing to make it of when it is needed.
    cuda::Stream stream = nullptr;
    DYNAFLOW_CUDA(driver_, StreamCreate, &stream, cuda::kStreamNonBlocking, kFirst);
    release_ = cuda::OwnedStream(stream, {&driver_});
  }
  return {};
}

Status CudaDevice::ConnectPeers(const Program& program) {
  std::vector<bool> connected(program.num_devices), signalled(program.num_devices);
  if (std::any_of(program.commands.begin(), program.commands.end(), IsSum)) {
    // It does not say whose memory it reads, and may read this device's only.
    for (uint32_t device = 0; device < program.num_devices; ++device) {
      DYNAFLOW_RETURN_IF_ERROR(ConnectPeer(device, /*must_reach=*/false));
    }
    connected.assign(connected.size(), true);
  }
  for (size_t i = 0; i < program.commands.size(); ++i) {
    const Command& c = program.commands[i];
    if (c.kind == CommandKind::kCopy && c.target != 0 && !connected[c.target]) {
      DYNAFLOW_RETURN_IF_ERROR(ConnectPeer(c.target, /*must_reach=*/false));
      connected[c.target] = true;
    }
    if (c.kind == CommandKind::kSignal && !signalled[c.target]) {
      DYNAFLOW_RETURN_IF_ERROR(
          ConnectPeer(c.target, /*must_reach=*/true).Within([&] { return Describe(program, i); }));
      signalled[c.target] = true;
    }
  }
  return {};
}

// Gives this device access to another one's memory. Where there is none to give, the driver stages copies
// through the host; a flag it cannot set.
Status CudaDevice::ConnectPeer(uint32_t device, bool must_reach) {
  if (device == 0 || contexts_[device].get() == nullptr) return {};
  const int result = driver_.EnablePeerAccess(contexts_[device].get(), 0);
  if (result == cuda::kErrorPeerAccessAlreadyEnabled) return {};
  if (result == cuda::kErrorPeerAccessUnsupported && !must_reach) return {};
  return driver_.Check(result, "EnablePeerAccess").Within([&] {
    return StrCat("device ", contexts_[0].device(), " cannot reach the memory of device ",
                  contexts_[device].device());
  });
}

// Finds the graph for each launch: the capture itself, or a version of it for the stream's priority or SMs.
Status CudaDevice::PreparePartitions(const Program& program) {
  std::map<std::pair<uint32_t, uint32_t>, cuda::Graph> versions;  // by partition and stream
  graphs_.resize(program.commands.size());
  for (size_t i = 0; i < program.commands.size(); ++i) {
    const Command& c = program.commands[i];
    if (c.kind != CommandKind::kLaunch) continue;
    cuda::Graph& graph = versions[{c.target, c.stream}];
    if (graph == nullptr) {
      const Stream& stream = program.streams[c.stream];
      graph = captures_[c.target]->graph.get();
      if (stream.sm_budget || stream.priority) {
        auto version = stream.sm_budget ? cuda::RecaptureOn(driver_, graph, streams_[c.stream].get())
                                        : cuda::WithPriority(driver_, graph, stream.priority);
        if (!version.ok()) return version.status().Within([&] { return Describe(program, i); });
        graph = version->get();
        own_graphs_.push_back(std::move(*version));
      }
    }
    graphs_[i] = graph;
  }
  return {};
}

// Before the first run, when an earlier one may still be waiting on the device: the driver may want it idle.
Status CudaDevice::LoadKernels(const Program& program) {
  const auto any = [&](bool (*is)(const Command&)) {
    return std::any_of(program.commands.begin(), program.commands.end(), is);
  };
  const bool sums = any(IsSum), flags = why_not_one_graph_.empty() && any(IsFlag);
  if (!sums && !flags) return {};
  auto kernels = cuda::ExchangeKernels::Of(driver_, contexts_[0].get());
  if (kernels.ok()) kernels_ = std::move(*kernels);
  return sums ? kernels.status() : Status();  // for flags there are the driver's operations
}

// What running command by command needs beyond the streams.
Status CudaDevice::InstantiatePartitions(const Program& program) {
  events_.clear();
  joins_.clear();
  execs_.clear();
  for (uint32_t i = 0; i < program.num_events; ++i) {
    DYNAFLOW_ASSIGN(OwnedEvent event, cuda::MakeEvent(driver_, cuda::kEventDisableTiming));
    events_.push_back(std::move(event));
  }
  for (size_t i = 0; i < streams_.size(); ++i) {
    DYNAFLOW_ASSIGN(OwnedEvent event, cuda::MakeEvent(driver_, cuda::kEventDisableTiming));
    joins_.push_back(std::move(event));
  }
  execs_.resize(program.commands.size());
  for (size_t i = 0; i < program.commands.size(); ++i) {
    if (graphs_[i] == nullptr) continue;
    cuda::GraphExec exec = nullptr;
    DYNAFLOW_RETURN_IF_ERROR(
        driver_.Check(driver_.GraphInstantiate(&exec, graphs_[i], 0), "GraphInstantiate").Within([&] {
          return Describe(program, i);
        }));
    execs_[i] = cuda::OwnedGraphExec(exec, {&driver_});
  }
  return {};
}

Status CudaDevice::Run(const Program& program, const Call& call) {
  const auto where = [&] { return StrCat("program '", program.name, "'"); };
  const cuda::ScopedContext scope(driver_, contexts_[0].get());
  DYNAFLOW_RETURN_IF_ERROR(scope.status().Within(where));
  DYNAFLOW_RETURN_IF_ERROR(CheckEarlierRuns(program).Within(where));
  const auto stream = static_cast<cuda::Stream>(call.stream);

  std::lock_guard lock(turn_->mutex);
  // On one stream, runs follow one another anyway.
  if (turn_->done && stream != turn_->stream) {
    DYNAFLOW_CUDA(driver_, StreamWaitEvent, stream, turn_->done->get(), 0);
  }
  Status status =
      why_not_one_graph_.empty() ? RunAsOneGraph(program, call, stream) : RunOnStreams(program, call, stream);
  const Status recorded = driver_.Check(driver_.EventRecord(done_->get(), stream), "EventRecord");
  has_run_ = true;
  has_times_ = status.ok() && recorded.ok();
  turn_->done = done_;
  turn_->stream = stream;
  return (status.ok() ? recorded : status).Within(where);
}

Result<std::vector<CommandTime>> CudaDevice::Times(const Program& program) {
  const auto where = [&] { return StrCat("program '", program.name, "'"); };
  if (!stopwatch_) return Device::Times(program);
  if (!has_times_)
    return FailedPrecondition(where(), has_run_ ? ": the last run failed" : " has not run yet");
  const cuda::ScopedContext scope(driver_, contexts_[0].get());
  DYNAFLOW_RETURN_IF_ERROR(scope.status().Within(where));
  DYNAFLOW_RETURN_IF_ERROR(
      driver_.Check(driver_.EventSynchronize(done_->get()), "EventSynchronize").Within(where));
  auto times = stopwatch_->Read();
  if (!times.ok()) return times.status().Within(where);
  return times;
}

std::string CudaDevice::Mode() const {
  return why_not_one_graph_.empty() ? "one graph" : StrCat("streams (", why_not_one_graph_, ")");
}

void CudaDevice::Release(const Program& program) {
  const cuda::ScopedContext scope(driver_, contexts_[0].get());
  if (!scope.status().ok()) return;  // it waits for nothing any more
  for (const Command& c : program.commands) {
    if (c.kind == CommandKind::kAwait) driver_.StreamWriteValue(release_.get(), c.writes[0].offset, 1, 0);
  }
}

bool CudaDevice::Idle() const {
  if (!has_run_) return true;
  const cuda::ScopedContext scope(driver_, contexts_[0].get());
  return !scope.status().ok() || driver_.EventQuery(done_->get()) != cuda::kErrorNotReady;
}

Status CudaDevice::Failure(const Program& program) {
  const cuda::ScopedContext scope(driver_, contexts_[0].get());
  const Status status = scope.status().ok() ? CheckEarlierRuns(program) : scope.status();
  return status.Within([&] { return StrCat("program '", program.name, "'"); });
}

// A kernel's error shows up some time after its launch. Here at the latest.
Status CudaDevice::CheckEarlierRuns(const Program& program) {
  if (!has_run_) return {};
  const int result = driver_.EventQuery(done_->get());
  if (result == cuda::kErrorNotReady) return {};
  const Status status = driver_.Check(result, "EventQuery");
  if (status.ok()) return {};
  return Internal("an earlier run failed on the device, in one of its operators (", Suspects(program),
                  ") or in other work on this device: ", status.message(),
                  "; run with blocking=True to learn which operator");
}

Status CudaDevice::RunAsOneGraph(const Program& program, const Call& call, cuda::Stream stream) {
  if (!whole_) {
    auto built = cuda::ProgramGraph::Build(driver_, contexts_[0].get(), kernels_, program, graphs_, call,
                                           stopwatch_ ? &*stopwatch_ : nullptr);
    if (!built.ok()) {
      // Some partitions cannot be part of a larger graph (their libraries allocate memory, say).
      DYNAFLOW_RETURN_IF_ERROR(InstantiatePartitions(program));
      why_not_one_graph_ = built.status().message();
      return RunOnStreams(program, call, stream);
    }
    whole_ = std::move(*built);
  }
  return whole_->Launch(program, call, stream).Within([&] {
    return StrCat("one of the operators ", Suspects(program));
  });
}

Status CudaDevice::RunOnStreams(const Program& program, const Call& call, cuda::Stream stream) {
  if (stopwatch_) DYNAFLOW_CUDA(driver_, EventRecord, stopwatch_->start(), stream);
  DYNAFLOW_CUDA(driver_, EventRecord, fork_.get(), stream);
  for (const auto& own : streams_) DYNAFLOW_CUDA(driver_, StreamWaitEvent, own.get(), fork_.get(), 0);
  Status status;
  for (size_t i = 0; i < program.commands.size() && status.ok(); ++i) {
    status = Issue(program, i, call).Within([&] { return Describe(program, i); });
  }
  // Join in any case: XLA may free this call's buffers as soon as its own stream gets there.
  for (size_t i = 0; i < streams_.size(); ++i) {
    Status joined = driver_.Check(driver_.EventRecord(joins_[i].get(), streams_[i].get()), "EventRecord");
    if (joined.ok()) {
      joined = driver_.Check(driver_.StreamWaitEvent(stream, joins_[i].get(), 0), "StreamWaitEvent");
    }
    if (status.ok()) status = joined.Within([&] { return StrCat("joining stream ", i); });
  }
  return status;
}

Status CudaDevice::Issue(const Program& program, size_t command, const Call& call) {
  const Command& c = program.commands[command];
  const cuda::Stream stream = streams_[c.stream].get();
  // Not the end of the command before: the host may issue this one later than that.
  const bool timed = stopwatch_ && cuda::Stopwatch::Times(c);
  if (timed) DYNAFLOW_CUDA(driver_, EventRecord, stopwatch_->before(command), stream);
  switch (c.kind) {
    case CommandKind::kLaunch:
      DYNAFLOW_CUDA(driver_, GraphLaunch, execs_[command].get(), stream);
      break;
    case CommandKind::kCopy: {
      const size_t bytes = c.writes[0].bytes;
      if (bytes == 0) break;
      const auto dst = reinterpret_cast<cuda::DevicePtr>(Resolve(c.writes[0], call));
      const auto src = reinterpret_cast<cuda::DevicePtr>(Resolve(c.reads[0], call));
      if (c.rows.count > 1) {
        const cuda::Memcpy3D copy = cuda::CopyOf(c, dst, src);
        DYNAFLOW_CUDA(driver_, Memcpy3DAsync, &copy, stream);
      } else if (contexts_[c.target].get() == nullptr || c.target == 0) {  // the address tells the device
        DYNAFLOW_CUDA(driver_, MemcpyAsync, dst, src, bytes, stream);
      } else {
        DYNAFLOW_CUDA(driver_, MemcpyPeerAsync, dst, contexts_[c.target].get(), src, contexts_[0].get(),
                      bytes, stream);
      }
      break;
    }
    case CommandKind::kRecord:
      DYNAFLOW_CUDA(driver_, EventRecord, events_[c.target].get(), stream);
      break;
    case CommandKind::kWait:
      DYNAFLOW_CUDA(driver_, StreamWaitEvent, stream, events_[c.target].get(), 0);
      break;
    case CommandKind::kSignal:
      DYNAFLOW_CUDA(driver_, StreamWriteValue, stream, c.writes[0].offset, 1, 0);
      break;
    case CommandKind::kAwait:
      DYNAFLOW_CUDA(driver_, StreamWaitValue, stream, c.writes[0].offset, 1, cuda::kWaitValueGeq);
      DYNAFLOW_CUDA(driver_, StreamWriteValue, stream, c.writes[0].offset, 0, 0);
      break;
    case CommandKind::kSum:
      DYNAFLOW_RETURN_IF_ERROR(kernels_->LaunchSum(c, stream));
      break;
  }
  if (timed) {
    DYNAFLOW_CUDA(driver_, EventRecord, stopwatch_->after(command), stream);
    stopwatch_->Set(command, stopwatch_->before(command), stopwatch_->after(command));
  }
  if (options_.blocking) DYNAFLOW_CUDA(driver_, StreamSynchronize, stream);
  return {};
}

}  // namespace dynaflow
