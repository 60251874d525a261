#include "xla_ffi/registry.h"

#include <algorithm>
#include <chrono>
#include <list>
#include <thread>
#include <utility>

namespace dynaflow {
namespace {

// Waits until nobody runs on the devices any more, while the programs are still held: where a peer has
// failed, the watchdog can only release a program that it finds.
void AwaitIdle(const std::list<ProgramSets::Set>& gone) {
  for (const auto& set : gone) {
    for (const auto& [device, executor] : set) {
      while (executor->Failure().ok() && !executor->Idle())
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

Status Closed() { return FailedPrecondition("no plan runs any more: the process is about to exit"); }

}  // namespace

Plan::Plan(OnMiss on_miss, size_t capacity, size_t participants, double timeout, bool across)
    : on_miss_(std::move(on_miss)), timeout_(timeout), programs_(participants, capacity) {
  stats_.participants = participants;
  if (participants > 1 || across) rendezvous_.emplace(participants, timeout, across);
}

// While there is still a watchdog.
Plan::~Plan() { Forget(); }

void Plan::SetPeers(std::shared_ptr<const Peers> peers) {
  if (rendezvous_) rendezvous_->SetPeers(std::move(peers));
}

void Plan::Add(int device, std::shared_ptr<Executor> executor) {
  std::list<ProgramSets::Set> gone;  // waited for and destroyed after the lock
  {
    std::lock_guard lock(mutex_);
    gone = programs_.Add(device, std::move(executor));
    for (const auto& set : gone) stats_.evictions += set.size();
  }
  AwaitIdle(gone);
}

void Plan::Forget() {
  std::list<ProgramSets::Set> gone;  // as above
  {
    std::lock_guard lock(mutex_);
    gone = programs_.DropAll();
    for (const auto& set : gone) stats_.evictions += set.size();
  }
  AwaitIdle(gone);
}

void Plan::Close() {
  OnMiss owner;  // goes now: whoever drops the plan later may be too late to call its destructor
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    if (rendezvous_) rendezvous_->Close(Closed());  // of some run not all devices may have come yet
    if (idle_.wait_for(lock, Seconds(timeout_), [&] { return under_way_ == 0; })) owner.swap(on_miss_);
  }
  Forget();
}

std::shared_ptr<Executor> Plan::Find(const Call& call) {
  std::lock_guard lock(mutex_);
  return programs_.Find(call);
}

Status Plan::Run(Call call) {
  call.timeout = timeout_;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return Closed();
    ++under_way_;
  }
  const Status status = Caught([&] { return RunOpen(call); });
  std::lock_guard lock(mutex_);
  if (--under_way_ == 0) idle_.notify_all();
  return status;
}

Status Plan::RunOpen(const Call& call) {
  if (!rendezvous_) return RunAlone(call);
  return rendezvous_->Run(call, [this](std::span<const Call> calls) { return Prepare(calls); });
}

Status Plan::Miss(std::span<const Call> calls) {
  {
    std::list<ProgramSets::Set> gone;  // what an owner left that failed half-way
    std::lock_guard lock(mutex_);
    ++stats_.misses;
    gone = programs_.DropIncomplete();
  }
  return on_miss_(calls);
}

Status Plan::RunAlone(const Call& call) {
  std::shared_ptr<Executor> executor = Find(call);
  if (!executor) {
    if (!on_miss_)
      return FailedPrecondition("the plan has no program for these inputs on device ", call.device);
    std::lock_guard lock(missing_);
    executor = Find(call);  // another thread may have made it meanwhile
    if (!executor) {
      DYNAFLOW_RETURN_IF_ERROR(Miss(std::span(&call, 1)));
      executor = Find(call);
    }
    if (!executor) {
      return FailedPrecondition("the program that was just added does not fit the call on device ",
                                call.device);
    }
  }
  {
    std::lock_guard lock(mutex_);
    ++stats_.runs;
  }
  return executor->Run(call);
}

// The programs for a run that all devices have come to. What prevents one of them is found now: once others
// have launched, it would break the plan.
Result<ProgramSets::Executors> Plan::Prepare(std::span<const Call> calls) {
  DYNAFLOW_ASSIGN(ProgramSets::Executors executors, FindOrMake(calls));
  for (size_t i = 0; i < calls.size(); ++i) {
    DYNAFLOW_RETURN_IF_ERROR(
        executors[i]->Check(calls[i]).Within([&] { return StrCat("device ", calls[i].device); }));
  }
  return executors;
}

Result<ProgramSets::Executors> Plan::FindOrMake(std::span<const Call> calls) {
  const auto find = [&] {
    std::lock_guard lock(mutex_);
    auto executors = programs_.FindAll(calls);
    if (!executors.empty()) stats_.runs += executors.size();
    return executors;
  };
  const auto misfit = [&] {
    std::lock_guard lock(mutex_);
    return programs_.Misfit(calls);
  };
  ProgramSets::Executors executors = find();
  if (!executors.empty()) return executors;
  if (!on_miss_) return FailedPrecondition("the plan has no program for these inputs on device ", misfit());
  // The owner captures from the inputs' memory, of all devices, so what computes them has to be over.
  for (const Call& call : calls) {
    if (!call.synchronize) continue;
    DYNAFLOW_RETURN_IF_ERROR(
        call.synchronize(call.stream).Within([&] { return StrCat("the inputs of device ", call.device); }));
  }
  DYNAFLOW_RETURN_IF_ERROR(Miss(calls));
  executors = find();
  if (!executors.empty()) return executors;
  return FailedPrecondition("the programs that were just added do not fit the call on device ", misfit());
}

Plan::Stats Plan::stats() const {
  std::lock_guard lock(mutex_);
  Stats stats = stats_;
  for (const auto& set : programs_.sets()) stats.programs += set.size();
  if (rendezvous_) stats.broken = rendezvous_->broken().message();
  return stats;
}

std::vector<std::pair<int, std::shared_ptr<Executor>>> Plan::programs() const {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<int, std::shared_ptr<Executor>>> all;
  for (const auto& set : programs_.sets()) all.insert(all.end(), set.begin(), set.end());
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return all;
}

Registry& Registry::Global() {
  // Never destroyed: XLA's threads may still call while the process exits. The module clears it before that.
  static Registry& registry = *new Registry;
  return registry;
}

int64_t Registry::Add(std::shared_ptr<Plan> plan) {
  std::lock_guard lock(mutex_);
  std::erase_if(plans_, [](const auto& entry) { return entry.second.plan.expired(); });
  plans_.emplace(next_id_, Entry{plan, plan});
  return next_id_++;
}

Result<std::shared_ptr<Plan>> Registry::Find(int64_t id) const {
  std::lock_guard lock(mutex_);
  const auto it = plans_.find(id);
  if (auto plan = it == plans_.end() ? nullptr : it->second.plan.lock()) return plan;
  return NotFound("no plan ", id, ": it was freed, or never made");
}

Status Registry::Free(int64_t id) {
  std::shared_ptr<Plan> freed;  // destroyed after the lock
  std::lock_guard lock(mutex_);
  const auto it = plans_.find(id);
  if (it == plans_.end() || !it->second.owned) return NotFound("no plan ", id, " to free");
  freed = std::move(it->second.owned);
  return {};
}

void Registry::Clear() {
  std::unordered_map<int64_t, Entry> all;
  {
    std::lock_guard lock(mutex_);
    all.swap(plans_);
  }
  for (const auto& [id, entry] : all) {
    if (const auto plan = entry.plan.lock()) plan->Close();
  }
}

size_t Registry::size() const {
  std::lock_guard lock(mutex_);
  return std::count_if(plans_.begin(), plans_.end(), [](const auto& entry) { return entry.second.owned; });
}

}  // namespace dynaflow
