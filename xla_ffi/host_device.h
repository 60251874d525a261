// The host twin: worker threads as streams, so that everything but the CUDA calls is tested on any machine.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xla_ffi/device.h"

namespace dynaflow {

// The work of one partition. It may throw; what it throws becomes the run's error.
using HostPartition = std::function<Status()>;

class HostDevice final : public Device {
 public:
  // One partition for each of the program's, in its order. Starts one thread per stream.
  // `timed`: whether to take the time of every command.
  // `processes`: which of the call's peers each of the program's devices belongs to, or kOwnProcess; empty if
  // all belong to this process.
  static Result<std::unique_ptr<Device>> Create(const Program& program, std::vector<HostPartition> partitions,
                                                bool timed = false, std::vector<int> processes = {});
  static constexpr int kOwnProcess = -1;
  ~HostDevice() override;

  // The first operator to fail ends the run, on all of the devices that take part: the others stop at their
  // next command, and every waiter wakes up.
  Status Run(const Program& program, const Call& call) override;
  Result<std::vector<CommandTime>> Times(const Program& program) override;
  std::string Mode() const override { return "threads"; }

 private:
  using Clock = std::chrono::steady_clock;
  struct RunState;

  HostDevice(const Program& program, std::vector<HostPartition> partitions, bool timed,
             std::vector<int> processes);
  Status StartWorkers(size_t count);
  void Work(size_t stream);
  Status Execute(const Command& command, RunState& run);

  std::vector<HostPartition> partitions_;
  const std::vector<int> processes_;  // of each of the program's devices

  // Of a timed program. Each worker writes about its own commands, and nobody reads during a run.
  const bool timed_;
  Clock::time_point started_;
  std::vector<std::pair<Clock::time_point, Clock::time_point>> spans_;  // by command
  enum class LastRun { kNone, kFailed, kDone } last_run_ = LastRun::kNone;

  std::mutex mutex_;
  std::condition_variable changed_;
  RunState* run_ = nullptr;  // the run under way
  uint64_t generation_ = 0;  // counts runs, so that a worker takes each one once
  size_t working_ = 0;       // workers that have not finished the run
  bool stopping_ = false;

  std::vector<std::thread> workers_;  // last: they use all of the above
};

}  // namespace dynaflow
