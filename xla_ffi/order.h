// What runs before what, and which memory accesses nothing orders.
#pragma once

#include <cstdint>
#include <vector>

#include "xla_ffi/program.h"
#include "xla_ffi/status.h"

namespace dynaflow {

// The happens-before relation of a program: order within a stream, plus record -> wait of each event.
//
// Each command keeps, per stream, how many commands of that stream finish before it starts (a vector clock),
// so a question costs one comparison.
class Order {
 public:
  explicit Order(const Program& program);

  // Whether command `a` is finished before command `b` starts, on any device and any timing.
  bool Before(size_t a, size_t b) const { return clocks_[b * num_streams_ + stream_[a]] > position_[a]; }
  bool Ordered(size_t a, size_t b) const { return Before(a, b) || Before(b, a); }

 private:
  size_t num_streams_;
  std::vector<uint32_t> stream_;    // of each command
  std::vector<uint32_t> position_;  // of each command within its stream
  std::vector<uint32_t> clocks_;    // commands x streams
};

// Two commands that touch the same bytes, at least one of them writing.
struct Conflict {
  size_t first, second;  // commands, in program order
  Range bytes;           // the bytes in common

  bool operator==(const Conflict&) const = default;
};

// All conflicts, ordered or not, by `second`; one per pair of commands, so they may be as many as there are
// pairs: the checks below look at the last ones to touch each byte only. Memory that can only be the same is
// the same: a pinned input is its address, and a donated input is its output.
std::vector<Conflict> FindConflicts(const Program& program);

// Refuses a program in which two unordered operators touch the same bytes (naming both), or in which an
// operator writes an input that is not donated, or copies bytes to where a part of them is (naming it).
Status CheckOverlap(const Program& program);

// Adds the events that CheckOverlap finds missing: the later operator, in program order, waits for the
// earlier one. Returns how many it added.
Result<size_t> OrderOverlaps(Program& program);

}  // namespace dynaflow
