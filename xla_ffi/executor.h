// A program on its device, ready to be called.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "xla_ffi/device.h"
#include "xla_ffi/program.h"
#include "xla_ffi/status.h"

namespace dynaflow {

class Executor {
 public:
  // `keep_alive`: whatever must not go before the last run is over: the private pool, the executables.
  Executor(Program program, std::unique_ptr<Device> device, std::shared_ptr<void> keep_alive = nullptr)
      : program_(std::move(program)), keep_alive_(std::move(keep_alive)), device_(std::move(device)) {}

  const Program& program() const { return program_; }
  std::string Mode() const;

  // Whether every pinned input and output lies where the program expects it.
  bool Matches(const Call& call) const;

  // Why it cannot run a call, if so.
  Status Check(const Call& call) const;

  // Thread-safe: the runs of one program share its private pool, so they follow one another.
  Status Run(const Call& call);

  // See Device. Times waits for the last run; the others wait for nothing.
  Result<std::vector<CommandTime>> Times();
  void Release() { device_->Release(program_); }
  bool Idle() const { return device_->Idle(); }
  Status Failure() { return device_->Failure(program_); }

 private:
  const Program program_;
  mutable std::mutex running_;
  const std::shared_ptr<void> keep_alive_;  // destroyed after the device, which waits for its work
  const std::unique_ptr<Device> device_;
};

}  // namespace dynaflow
