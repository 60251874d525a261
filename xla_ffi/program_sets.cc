#include "xla_ffi/program_sets.h"

#include <algorithm>
#include <iterator>

namespace dynaflow {
namespace {

// The set's program for a device, or null.
const std::shared_ptr<Executor>* ProgramFor(const ProgramSets::Set& set, int device) {
  for (const auto& [member, executor] : set) {
    if (member == device) return &executor;
  }
  return nullptr;
}

bool HasFitFor(const ProgramSets::Set& set, const Call& call) {
  const auto* executor = ProgramFor(set, call.device);
  return executor && (*executor)->Matches(call);
}

}  // namespace

ProgramSets::ProgramSets(size_t participants, size_t capacity)
    : participants_(std::max<size_t>(participants, 1)), capacity_(std::max<size_t>(capacity, 1)) {}

std::list<ProgramSets::Set> ProgramSets::Add(int device, std::shared_ptr<Executor> executor) {
  for (Set& set : sets_) {
    if (set.size() == participants_ || ProgramFor(set, device)) continue;
    set.emplace_back(device, std::move(executor));
    return {};
  }
  sets_.push_front({{device, std::move(executor)}});
  std::list<Set> gone;
  size_t kept = 0;
  for (auto it = sets_.begin(); it != sets_.end();) {
    const auto set = it++;
    if (ProgramFor(*set, device) && ++kept > capacity_) gone.splice(gone.end(), sets_, set);
  }
  return gone;
}

std::list<ProgramSets::Set> ProgramSets::DropIncomplete() {
  std::list<Set> gone;
  for (auto it = sets_.begin(); it != sets_.end();) {
    const auto set = it++;
    if (set->size() < participants_) gone.splice(gone.end(), sets_, set);
  }
  return gone;
}

bool ProgramSets::Fits(const Set& set, std::span<const Call> calls) const {
  return set.size() == participants_ &&
         std::all_of(calls.begin(), calls.end(), [&](const Call& call) { return HasFitFor(set, call); });
}

std::list<ProgramSets::Set>::iterator ProgramSets::Use(std::span<const Call> calls) {
  const auto set = std::find_if(sets_.begin(), sets_.end(), [&](const Set& set) { return Fits(set, calls); });
  if (set != sets_.end()) sets_.splice(sets_.begin(), sets_, set);
  return set;
}

std::shared_ptr<Executor> ProgramSets::Find(const Call& call) {
  const auto set = Use(std::span(&call, 1));
  return set == sets_.end() ? nullptr : *ProgramFor(*set, call.device);
}

ProgramSets::Executors ProgramSets::FindAll(std::span<const Call> calls) {
  Executors executors;
  const auto set = Use(calls);
  if (set == sets_.end()) return executors;
  for (const Call& call : calls) executors.push_back(*ProgramFor(*set, call.device));
  return executors;
}

int ProgramSets::Misfit(std::span<const Call> calls) const {
  for (const Call& call : calls) {
    // Half a set may be all that an owner has added: what it lacks is what to name.
    const bool fits =
        std::any_of(sets_.begin(), sets_.end(), [&](const Set& set) { return HasFitFor(set, call); });
    if (!fits) return call.device;
  }
  return calls.empty() ? 0 : calls.front().device;
}

}  // namespace dynaflow
