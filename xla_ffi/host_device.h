// The host twin: worker threads as streams, so that everything but the CUDA calls is tested on any machine.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/device.h"

namespace dynaflow {

// The work of one partition. It may throw; what it throws becomes the run's error.
using HostPartition = std::function<Status()>;

class HostDevice final : public Device {
 public:
  // One partition for each of the program's, in its order. Starts one thread per stream.
  static Result<std::unique_ptr<Device>> Create(const Program& program,
                                                std::vector<HostPartition> partitions);
  ~HostDevice() override;

  // The first operator to fail ends the run, on all of the devices that take part: the others stop at their
  // next command, and every waiter wakes up.
  Status Run(const Program& program, const Call& call) override;
  std::string Mode() const override { return "threads"; }

 private:
  struct RunState;

  HostDevice(size_t num_streams, std::vector<HostPartition> partitions);
  void Work(size_t stream);
  Status Execute(const Command& command, RunState& run);

  std::vector<HostPartition> partitions_;

  std::mutex mutex_;
  std::condition_variable changed_;
  RunState* run_ = nullptr;  // the run under way
  uint64_t generation_ = 0;  // counts runs, so that a worker takes each one once
  size_t working_ = 0;       // workers that have not finished the run
  bool stopping_ = false;

  std::vector<std::thread> workers_;  // last: they use all of the above
};

}  // namespace dynaflow
