// The plans that custom calls refer to by number.
//
// A plan's programs differ by device and by the addresses of the pinned inputs. When a call fits none of
// them, the plan's owner is asked for one more: that is how a plan is captured at first use, and again after
// a weight moved.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xla_ffi/executor.h"
#include "xla_ffi/status.h"

namespace dynaflow {

class Plan {
 public:
  // Is to add a program that fits the call. Called without a lock on the programs, by one thread at a time.
  using OnMiss = std::function<Status(int device, const Call& call)>;

  // Keeps up to `capacity` programs for each device, and forgets the least recently used.
  Plan(OnMiss on_miss, size_t capacity)
      : on_miss_(std::move(on_miss)), capacity_(capacity == 0 ? 1 : capacity) {}

  void Add(int device, std::shared_ptr<Executor> executor);
  Status Run(int device, const Call& call);

  struct Stats {
    size_t programs = 0;  // kept now
    uint64_t runs = 0;
    uint64_t misses = 0;     // calls that no program fitted
    uint64_t evictions = 0;  // programs forgotten
  };
  Stats stats() const;
  std::vector<std::pair<int, std::shared_ptr<Executor>>> programs() const;  // with their devices

 private:
  std::shared_ptr<Executor> Find(int device, const Call& call);

  const OnMiss on_miss_;
  const size_t capacity_;
  std::mutex missing_;  // held while the owner makes a program; taken before mutex_

  mutable std::mutex mutex_;                                      // for what follows
  std::map<int, std::list<std::shared_ptr<Executor>>> programs_;  // per device, most recently used first
  Stats stats_;
};

// Thread-safe. Whoever runs a plan holds it, so freeing it meanwhile is safe: it goes when the last run
// returns.
class Registry {
 public:
  static Registry& Global();

  int64_t Add(std::shared_ptr<Plan> plan);
  Result<std::shared_ptr<Plan>> Find(int64_t id) const;
  Status Free(int64_t id);
  void Clear();
  size_t size() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<Plan>> plans_;
  int64_t next_id_ = 1;
};

}  // namespace dynaflow
