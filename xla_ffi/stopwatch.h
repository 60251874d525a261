// When the commands of a program ran on a GPU, by events before and after each.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "xla_ffi/cuda_driver.h"
#include "xla_ffi/device.h"
#include "xla_ffi/program.h"

namespace dynaflow::cuda {

class Stopwatch {
 public:
  // With events for the start of a run and for both ends of every command, in the current context.
  static Result<Stopwatch> Create(const Driver& driver, const Program& program);

  // Whether there is something to time: neither order alone, nor a copy of nothing.
  static bool Times(const Command& c) {
    return !IsEvent(c) && !(c.kind == CommandKind::kCopy && c.writes[0].bytes == 0);
  }

  // Events to record: where a run starts, before a command, after it.
  Event start() const { return start_.get(); }
  Event before(size_t command) const { return before_[command].get(); }
  Event after(size_t command) const { return after_[command].get(); }

  // Says which events a command ran between: often its own; a command that begins when another ends needs
  // none of its own before it, and commands that are one node share theirs.
  void Set(size_t command, Event begin, Event end) { spans_[command] = {begin, end}; }

  // The times of a run that is over.
  Result<std::vector<CommandTime>> Read() const;

 private:
  explicit Stopwatch(const Driver& driver) : driver_(&driver) {}

  const Driver* driver_;
  OwnedEvent start_;
  std::vector<OwnedEvent> before_, after_;  // by command
  std::vector<std::pair<Event, Event>> spans_;
};

}  // namespace dynaflow::cuda
