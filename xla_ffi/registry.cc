#include "xla_ffi/registry.h"

#include <utility>

namespace dynaflow {

void Plan::Add(int device, std::shared_ptr<Executor> executor) {
  std::list<std::shared_ptr<Executor>> evicted;  // destroyed after the lock: that may wait for the device
  std::lock_guard lock(mutex_);
  auto& list = programs_[device];
  list.push_front(std::move(executor));
  while (list.size() > capacity_) {
    evicted.splice(evicted.end(), list, std::prev(list.end()));
    ++stats_.evictions;
  }
}

std::shared_ptr<Executor> Plan::Find(int device, const Call& call) {
  std::lock_guard lock(mutex_);
  auto& list = programs_[device];
  for (auto it = list.begin(); it != list.end(); ++it) {
    if (!(*it)->Matches(call)) continue;
    list.splice(list.begin(), list, it);
    return list.front();
  }
  return nullptr;
}

Status Plan::Run(int device, const Call& call) {
  std::shared_ptr<Executor> executor = Find(device, call);
  if (!executor) {
    if (!on_miss_) return FailedPrecondition("the plan has no program for these inputs on device ", device);
    std::lock_guard lock(missing_);
    executor = Find(device, call);  // another thread may have made it meanwhile
    if (!executor) {
      {
        std::lock_guard stats_lock(mutex_);
        ++stats_.misses;
      }
      DYNAFLOW_RETURN_IF_ERROR(on_miss_(device, call));
      executor = Find(device, call);
    }
    if (!executor)
      return FailedPrecondition("the program that was just added does not fit the call on device ", device);
  }
  {
    std::lock_guard lock(mutex_);
    ++stats_.runs;
  }
  return executor->Run(call);
}

Plan::Stats Plan::stats() const {
  std::lock_guard lock(mutex_);
  Stats stats = stats_;
  for (const auto& [device, list] : programs_) stats.programs += list.size();
  return stats;
}

std::vector<std::pair<int, std::shared_ptr<Executor>>> Plan::programs() const {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<int, std::shared_ptr<Executor>>> all;
  for (const auto& [device, list] : programs_) {
    for (const auto& executor : list) all.emplace_back(device, executor);
  }
  return all;
}

Registry& Registry::Global() {
  // Never destroyed: XLA's threads may still call while the process exits. The module clears it before that.
  static Registry& registry = *new Registry;
  return registry;
}

int64_t Registry::Add(std::shared_ptr<Plan> plan) {
  std::lock_guard lock(mutex_);
  plans_.emplace(next_id_, std::move(plan));
  return next_id_++;
}

Result<std::shared_ptr<Plan>> Registry::Find(int64_t id) const {
  std::lock_guard lock(mutex_);
  const auto it = plans_.find(id);
  if (it == plans_.end()) return NotFound("no plan ", id, ": it was freed, or never made");
  return it->second;
}

Status Registry::Free(int64_t id) {
  std::shared_ptr<Plan> freed;  // destroyed after the lock
  std::lock_guard lock(mutex_);
  const auto it = plans_.find(id);
  if (it == plans_.end()) return NotFound("no plan ", id, " to free");
  freed = std::move(it->second);
  plans_.erase(it);
  return {};
}

void Registry::Clear() {
  std::unordered_map<int64_t, std::shared_ptr<Plan>> freed;
  std::lock_guard lock(mutex_);
  freed.swap(plans_);
}

size_t Registry::size() const {
  std::lock_guard lock(mutex_);
  return plans_.size();
}

}  // namespace dynaflow
