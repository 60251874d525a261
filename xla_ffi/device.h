// What a program runs on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "xla_ffi/program.h"
#include "xla_ffi/status.h"

namespace dynaflow {

// One call of a program: where XLA put its inputs and outputs this time.
struct Call {
  void* stream = nullptr;  // CUDA: XLA's stream, which the program forks from and joins; host: unused
  std::span<void* const> inputs;
  std::span<void* const> outputs;
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

// A device that has been made ready for one program: its streams, events and partitions.
class Device {
 public:
  virtual ~Device() = default;

  // Runs the program once, after everything the device already runs of it. Called by one thread at a time.
  // A CUDA device returns as soon as all is enqueued; the host device returns when all is done.
  virtual Status Run(const Program& program, const Call& call) = 0;

  // How it runs, for people.
  virtual std::string Mode() const = 0;
};

}  // namespace dynaflow
