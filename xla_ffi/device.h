// What a program runs on.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "xla_ffi/peers.h"
#include "xla_ffi/program.h"
#include "xla_ffi/shared_run.h"
#include "xla_ffi/status.h"

namespace dynaflow {

inline constexpr double kDefaultTimeout = 60;
inline constexpr double kMaxTimeout = 1e8;  // three years, which clocks can still add up

inline std::chrono::nanoseconds Seconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
}

// One call of a program: where XLA put its inputs and outputs this time.
struct Call {
  int device = 0;          // the ordinal of the device that calls
  void* stream = nullptr;  // CUDA: XLA's stream, which the program forks from and joins; host: unused
  std::span<void* const> inputs = {};
  std::span<void* const> outputs = {};
  int64_t run_id = 0;                      // the calls of one run, from several devices, have the same
  Status (*synchronize)(void*) = nullptr;  // waits for `stream`; null where the inputs are there already

  // Set by the plan.
  SharedRun* shared = nullptr;       // with the run's other devices; null for a device on its own
  const Peers* peers = nullptr;      // the other processes that take part; null if none do
  double timeout = kDefaultTimeout;  // how long to wait for another device, in seconds
};

// Where a range lies in this call.
inline std::byte* Resolve(const Range& r, const Call& call) {
  switch (r.space) {
    case Space::kInput:
      return static_cast<std::byte*>(call.inputs[r.index]) + r.offset;
    case Space::kOutput:
      return static_cast<std::byte*>(call.outputs[r.index]) + r.offset;
    case Space::kMemory:
      break;
  }
  return reinterpret_cast<std::byte*>(r.offset);
}

// When a command ran, in microseconds from the start of its run.
struct CommandTime {
  size_t command = 0;
  double begin_us = 0, end_us = 0;
};

// A device that has been made ready for one program: its streams, events and partitions.
class Device {
 public:
  virtual ~Device() = default;

  // Runs the program once, after everything the device already runs of it. Called by one thread at a time.
  // A CUDA device returns as soon as all is enqueued, unless it was made to wait for each command; the host
  // device returns when all is done.
  virtual Status Run(const Program& program, const Call& call) = 0;

  // When the commands of the last run ran, once it is over; of those that do something, in the program's
  // order. Fails where the device was not made to take times, or the last run failed.
  virtual Result<std::vector<CommandTime>> Times(const Program& program) {
    return FailedPrecondition("program '", program.name, "' was not added with timed=True");
  }

  // How it runs, for people.
  virtual std::string Mode() const = 0;

  // What follows may be called during Run and Times, from other threads: those may be waiting for what
  // Release sets. So it may only look at what is fixed once the device is made.

  // After a run has failed, here or elsewhere: sets every flag that this device awaits, since it may wait on
  // the device, where nobody can call it back. May have to be called again and again: a flag may be awaited
  // several times. Not needed where waiting ends with SharedRun::Fail.
  virtual void Release(const Program&) {}

  // Whether nothing of any earlier run is still under way.
  virtual bool Idle() const { return true; }

  // What has gone wrong on the device since a run returned, as far as that is known.
  virtual Status Failure(const Program&) { return {}; }
};

}  // namespace dynaflow
