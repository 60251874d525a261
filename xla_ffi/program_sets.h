// The programs of a plan, kept in sets: those that run together.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "xla_ffi/executor.h"

namespace dynaflow {

// A set has one program for each device that takes part in a run. They set one another's flags, so a program
// never runs with those of another set, whatever fits. For a plan of one participant each set is one program.
//
// Not thread-safe.
class ProgramSets {
 public:
  using Set = std::vector<std::pair<int, std::shared_ptr<Executor>>>;  // with their devices
  using Executors = std::vector<std::shared_ptr<Executor>>;

  // Keeps up to `capacity` sets with a program for the same device.
  ProgramSets(size_t participants, size_t capacity);

  // Completes a set that still lacks this device's program, or begins one. Returns the sets that had to go
  // for it, the least recently used; destroying them may wait for the device, so that is for where no lock is
  // held.
  [[nodiscard]] std::list<Set> Add(int device, std::shared_ptr<Executor> executor);

  // Forgets sets that were begun and not completed.
  [[nodiscard]] std::list<Set> DropIncomplete();
  // Forgets all sets.
  [[nodiscard]] std::list<Set> DropAll() { return std::exchange(sets_, {}); }

  // The program for a call of a plan of one participant, or null.
  std::shared_ptr<Executor> Find(const Call& call);
  // The programs for the calls of one run, in their order, all of one set; or none.
  Executors FindAll(std::span<const Call> calls);

  // A device that no program fits; where each has one, but not all of one set, the first.
  int Misfit(std::span<const Call> calls) const;

  const std::list<Set>& sets() const { return sets_; }

 private:
  bool Fits(const Set& set, std::span<const Call> calls) const;
  std::list<Set>::iterator Use(std::span<const Call> calls);

  const size_t participants_, capacity_;
  std::list<Set> sets_;  // most recently used first
};

}  // namespace dynaflow
