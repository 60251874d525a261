#include "xla_ffi/host_device.h"

#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

#include "xla_ffi/host_flags.h"
#include "xla_ffi/host_sum.h"

namespace dynaflow {

// What the workers share during one run.
struct HostDevice::RunState {
  RunState(const Program& program, const Call& call)
      : program(program),
        call(call),
        shared(call.shared ? *call.shared : own),
        recorded(program.num_events) {}

  void Record(uint32_t event) {
    {
      std::lock_guard lock(mutex);
      recorded[event] = true;
    }
    changed.notify_all();
  }

  // Returns at the record, or as soon as the run has failed.
  void Wait(uint32_t event) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return recorded[event] || shared.failed(); });
  }

  // Wakes this device's waiters after a failure, here or on another device. Whichever worker was to record
  // what they wait for comes by here.
  void Stop() {
    {
      std::lock_guard lock(mutex);
    }  // not between a waiter's look and its sleep
    changed.notify_all();
  }

  // `process`: which of the peers sets the flag; kOwnProcess if none does.
  Status Await(const Command& c, int process) {
    if (process != kOwnProcess) return AwaitPeer(c, process);
    // Not from the run's start: the deadline is for the other device, not for what this one does before.
    const auto deadline = std::chrono::steady_clock::now() + Seconds(call.timeout);
    if (TakeFlag(Resolve(c.writes[0], call), [&] { return shared.failed(); }, deadline)) return {};
    if (shared.failed()) return {};  // and the error is there already
    return Internal("device ", c.target, " of the program did not answer within ", call.timeout, " s");
  }

  Status AwaitPeer(const Command& c, int process) {
    if (!call.peers || process < 0 || static_cast<size_t>(process) >= call.peers->size())
      return FailedPrecondition("process ", process, " is none of the plan's peers");
    const Peers& peers = *call.peers;
    Status lost;
    const auto stopped = [&] {
      lost = peers.Check(process);
      return shared.failed() || !lost.ok();
    };
    const auto deadline = std::chrono::steady_clock::now() + Seconds(peers.timeout());
    if (TakeFlag(Resolve(c.writes[0], call), stopped, deadline, /*from_another_process=*/true)) return {};
    if (shared.failed()) return {};
    return lost.ok() ? peers.Late(process) : lost;
  }

  const Program& program;
  const Call& call;
  SharedRun own;  // of a device that runs alone
  SharedRun& shared;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> recorded;
};

Result<std::unique_ptr<Device>> HostDevice::Create(const Program& program,
                                                   std::vector<HostPartition> partitions, bool timed,
                                                   std::vector<int> processes) {
  if (partitions.size() != program.partitions.size()) {
    return InvalidArgument("program '", program.name, "' has ", program.partitions.size(),
                           " partitions, but ", partitions.size(), " functions were given");
  }
  for (size_t i = 0; i < partitions.size(); ++i) {
    if (!partitions[i])
      return InvalidArgument("program '", program.name, "': partition ", i, " is no function");
  }
  if (processes.empty()) processes.assign(program.num_devices, kOwnProcess);
  if (processes.size() != program.num_devices) {
    return InvalidArgument("program '", program.name, "' spans ", program.num_devices, " devices, but ",
                           processes.size(), " processes were given");
  }
  std::unique_ptr<HostDevice> device(
      new HostDevice(program, std::move(partitions), timed, std::move(processes)));
  DYNAFLOW_RETURN_IF_ERROR(device->StartWorkers(program.streams.size()).Within([&] {
    return StrCat("program '", program.name, "': cannot start a thread for each stream");
  }));
  return std::unique_ptr<Device>(std::move(device));
}

HostDevice::HostDevice(const Program& program, std::vector<HostPartition> partitions, bool timed,
                       std::vector<int> processes)
    : partitions_(std::move(partitions)),
      processes_(std::move(processes)),
      timed_(timed),
      spans_(timed ? program.commands.size() : 0) {}

// After construction: where one cannot be started, the destructor joins those that were.
Status HostDevice::StartWorkers(size_t count) {
  return Caught([&] {
    workers_.reserve(count);
    for (size_t i = 0; i < count; ++i) workers_.emplace_back(&HostDevice::Work, this, i);
    return Status();
  });
}

HostDevice::~HostDevice() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

Status HostDevice::Run(const Program& program, const Call& call) {
  RunState run(program, call);
  std::unique_lock lock(mutex_);
  run_ = &run;
  working_ = workers_.size();
  if (timed_) started_ = Clock::now();
  ++generation_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return working_ == 0; });
  run_ = nullptr;
  const Status status = run.shared.status();
  last_run_ = status.ok() ? LastRun::kDone : LastRun::kFailed;
  return status;
}

Result<std::vector<CommandTime>> HostDevice::Times(const Program& program) {
  if (!timed_) return Device::Times(program);
  if (last_run_ != LastRun::kDone) {
    return FailedPrecondition("program '", program.name,
                              last_run_ == LastRun::kFailed ? "': the last run failed" : "' has not run yet");
  }
  const auto us = [&](Clock::time_point t) {
    return std::chrono::duration<double, std::micro>(t - started_).count();
  };
  std::vector<CommandTime> times;
  for (size_t i = 0; i < program.commands.size(); ++i) {
    if (IsEvent(program.commands[i])) continue;
    times.push_back({i, us(spans_[i].first), us(spans_[i].second)});
  }
  return times;
}

void HostDevice::Work(size_t stream) {
  uint64_t done = 0;  // the last run this worker took part in
  for (;;) {
    RunState* run;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || generation_ != done; });
      if (stopping_) return;
      done = generation_;
      run = run_;
    }
    const std::vector<Command>& commands = run->program.commands;
    for (size_t i = 0; i < commands.size() && !run->shared.failed(); ++i) {
      if (commands[i].stream != stream) continue;
      if (timed_) spans_[i].first = Clock::now();
      const Status s = Execute(commands[i], *run);
      if (timed_) spans_[i].second = Clock::now();
      if (!s.ok()) {
        run->shared.Fail(s.Within([&] {
          const std::string device = run->call.shared ? StrCat("device ", run->call.device, ": ") : "";
          return device + Describe(run->program, i);
        }));
      }
    }
    if (run->shared.failed()) run->Stop();
    {
      std::lock_guard lock(mutex_);
      --working_;
    }
    changed_.notify_all();
  }
}

Status HostDevice::Execute(const Command& c, RunState& run) {
  switch (c.kind) {
    case CommandKind::kLaunch:
      try {
        return partitions_[c.target]();
      } catch (const std::exception& e) {
        return Internal(e.what());
      } catch (...) {
        return Internal("threw something that is no std::exception");
      }
    case CommandKind::kCopy:
      // memmove: a copy onto itself is legal, and costs nothing extra here.
      for (uint32_t row = 0; row < c.rows.count; ++row) {
        std::memmove(Resolve(c.writes[0], run.call) + row * c.rows.write_pitch,
                     Resolve(c.reads[0], run.call) + row * c.rows.read_pitch, RowBytes(c));
      }
      return {};
    case CommandKind::kRecord:
      run.Record(c.target);
      return {};
    case CommandKind::kWait:
      run.Wait(c.target);
      return {};
    case CommandKind::kSignal:
      SetFlag(Resolve(c.writes[0], run.call));
      return {};
    case CommandKind::kAwait:
      return run.Await(c, processes_[c.target]);
    case CommandKind::kSum:
      HostSum(c, run.call);
      return {};
  }
  return Internal("unknown command");
}

}  // namespace dynaflow
