// Programs for tests.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/program.h"

namespace dynaflow {

inline Range Memory(uint64_t address, uint64_t bytes) { return {Space::kMemory, 0, address, bytes}; }
inline Range Memory(const void* address, uint64_t bytes) {
  return Memory(reinterpret_cast<uint64_t>(address), bytes);
}
inline Range InputBytes(uint32_t index, uint64_t offset, uint64_t bytes) {
  return {Space::kInput, index, offset, bytes};
}
inline Range OutputBytes(uint32_t index, uint64_t offset, uint64_t bytes) {
  return {Space::kOutput, index, offset, bytes};
}

// Grows a program one command a line.
class ProgramBuilder {
 public:
  explicit ProgramBuilder(uint32_t num_streams) {
    program_.name = "test";
    program_.streams.resize(num_streams);
  }

  // Each launch is a partition of its own.
  ProgramBuilder& Launch(uint32_t stream, std::string name, std::vector<Range> reads = {},
                         std::vector<Range> writes = {}) {
    const auto partition = static_cast<uint32_t>(program_.partitions.size());
    program_.partitions.push_back(partition);
    return Add(
        {CommandKind::kLaunch, stream, std::move(name), partition, std::move(reads), std::move(writes)});
  }
  ProgramBuilder& Copy(uint32_t stream, std::string name, Range to, Range from, uint32_t device = 0) {
    return Add({CommandKind::kCopy, stream, std::move(name), device, {from}, {to}});
  }
  ProgramBuilder& CopyRows(uint32_t stream, std::string name, Range to, Range from, Rows rows,
                           uint32_t device = 0) {
    return Add({CommandKind::kCopy, stream, std::move(name), device, {from}, {to}, rows});
  }
  ProgramBuilder& Record(uint32_t stream, uint32_t event) {
    if (event >= program_.num_events) program_.num_events = event + 1;
    return Add({CommandKind::kRecord, stream, "event", event, {}, {}});
  }
  ProgramBuilder& Wait(uint32_t stream, uint32_t event) {
    return Add({CommandKind::kWait, stream, "event", event, {}, {}});
  }
  ProgramBuilder& Signal(uint32_t stream, std::string name, const void* flag, uint32_t device = 0) {
    return Add({CommandKind::kSignal, stream, std::move(name), device, {}, {Memory(flag, kFlagBytes)}});
  }
  ProgramBuilder& Await(uint32_t stream, std::string name, const void* flag, uint32_t device = 0,
                        std::vector<Range> arrived = {}) {
    arrived.insert(arrived.begin(), Memory(flag, kFlagBytes));
    return Add({CommandKind::kAwait, stream, std::move(name), device, {}, std::move(arrived)});
  }
  ProgramBuilder& Sum(uint32_t stream, std::string name, Range to, std::vector<Range> parts,
                      Element element = Element::kFloat32) {
    return Add({CommandKind::kSum, stream, std::move(name), 0, std::move(parts), {to}, {}, element});
  }
  ProgramBuilder& SumAndNorm(uint32_t stream, std::string name, Range to, Range normed,
                             std::vector<Range> reads, Norm norm, Element element = Element::kFloat32) {
    return Add(
        {CommandKind::kSum, stream, std::move(name), 0, std::move(reads), {to, normed}, {}, element, norm});
  }
  ProgramBuilder& Devices(uint32_t count) {
    program_.num_devices = count;
    return *this;
  }
  ProgramBuilder& MovingInput(uint64_t bytes) {
    program_.inputs.push_back({InputKind::kMoving, 0, bytes});
    return *this;
  }
  ProgramBuilder& PinnedInput(uint64_t address, uint64_t bytes) {
    program_.inputs.push_back({InputKind::kPinned, address, bytes});
    return *this;
  }
  ProgramBuilder& Output(uint64_t bytes, int32_t donor = -1, uint64_t address = 0) {
    program_.outputs.push_back({donor, bytes, address});
    return *this;
  }

  Program& program() { return program_; }
  operator Program() const { return program_; }  // NOLINT

 private:
  ProgramBuilder& Add(Command command) {
    program_.commands.push_back(std::move(command));
    return *this;
  }

  Program program_;
};

// Everything the format has, once.
inline Program FullProgram() {
  Program p =
      ProgramBuilder(2)
          .MovingInput(64)
          .PinnedInput(0x1000, 128)
          .MovingInput(32)
          .Output(64)
          .Output(32, /*donor=*/2)
          .Output(16, /*donor=*/-1, /*address=*/0x2000)
          .Copy(0, "input", Memory(0x8000, 64), InputBytes(0, 0, 64))
          .Record(0, 0)
          .Launch(0, "attention", {Memory(0x8000, 64), Memory(0x1000, 128)}, {Memory(0x9000, 64)})
          .Wait(1, 0)
          .Launch(1, "ffn", {Memory(0x8000, 64)}, {OutputBytes(1, 0, 32)})
          .Record(1, 1)
          .Wait(0, 1)
          .Copy(0, "output", OutputBytes(0, 0, 64), Memory(0x9000, 64))
          .Signal(0, "send", reinterpret_cast<void*>(0x7000))
          .Await(0, "receive", reinterpret_cast<void*>(0x7100), 0, {Memory(0xa000, 64)})
          .CopyRows(0, "rows", Memory(0xb000, 56), Memory(0xc000, 24), {3, 8, 24})
          .Sum(0, "sum", Memory(0xd000, 64), {Memory(0xe000, 64), Memory(0xf000, 64)}, Element::kBFloat16)
          .SumAndNorm(0, "norm", Memory(0x10000, 64), Memory(0x11000, 64),
                      {Memory(0xe000, 64), Memory(0xf000, 64), Memory(0x12000, 64), Memory(0x13000, 64)},
                      {.width = 16,
                       .epsilon = 1e-6f,
                       .residual = true,
                       .weight = Element::kFloat32,
                       .rounds_scale = true,
                       .rounds_normed = true},
                      Element::kBFloat16);
  p.streams[1] = {.device = 0, .priority = -2, .sm_budget = 32};
  return p;
}

}  // namespace dynaflow
