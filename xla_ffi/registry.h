// The plans that custom calls refer to by number.
//
// A plan's programs differ by device and by the addresses of the pinned inputs. When a call fits none of
// them, the plan's owner is asked for one more: that is how a plan is captured at first use, and again after
// a weight moved.
//
// A plan whose programs communicate is called by all of its devices in every run, and its programs come in
// sets, one for each device.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xla_ffi/executor.h"
#include "xla_ffi/program_sets.h"
#include "xla_ffi/rendezvous.h"
#include "xla_ffi/status.h"

namespace dynaflow {

class Plan {
 public:
  // Is to add a program for each of the calls: those of one run, from all participants. Called without a lock
  // on the programs, by one thread at a time.
  using OnMiss = std::function<Status(std::span<const Call> calls)>;

  // `capacity`: how many programs to keep for each device; the least recently used go first.
  // `participants`: how many devices call the plan in every run, each for its part.
  // `timeout`: how long they wait for one another, in seconds.
  // `across`: whether devices of other processes take part as well.
  explicit Plan(OnMiss on_miss, size_t capacity, size_t participants = 1, double timeout = kDefaultTimeout,
                bool across = false);
  ~Plan();

  // Says who the other processes are; before the first program is added.
  void SetPeers(std::shared_ptr<const Peers> peers);

  // Programs that run together are to be added one after the other, one for each device.
  void Add(int device, std::shared_ptr<Executor> executor);
  // Forgets all programs; runs under way finish first, or are released.
  void Forget();
  // Runs nothing from now on. Waits for the runs under way, and lets go of all programs and of the owner.
  void Close();
  Status Run(Call call);

  struct Stats {
    size_t programs = 0;     // kept now
    uint64_t runs = 0;       // calls that ran
    uint64_t misses = 0;     // how often no program fitted
    uint64_t evictions = 0;  // programs forgotten
    size_t participants = 1;
    std::string broken;  // why no call can run any more; empty if they can
  };
  Stats stats() const;
  std::vector<std::pair<int, std::shared_ptr<Executor>>> programs() const;  // with their devices

 private:
  Status RunOpen(const Call& call);
  Status RunAlone(const Call& call);
  Result<ProgramSets::Executors> Prepare(std::span<const Call> calls);
  Result<ProgramSets::Executors> FindOrMake(std::span<const Call> calls);
  std::shared_ptr<Executor> Find(const Call& call);
  Status Miss(std::span<const Call> calls);

  OnMiss on_miss_;  // until the plan is closed
  const double timeout_;
  std::mutex missing_;  // held while the owner makes a program; taken before mutex_

  mutable std::mutex mutex_;  // for what follows
  ProgramSets programs_;
  Stats stats_;
  bool closed_ = false;
  size_t under_way_ = 0;  // runs
  std::condition_variable idle_;

  std::optional<Rendezvous> rendezvous_;  // where there are several participants, here or elsewhere
};

// Plans by number; thread-safe. A plan that was freed goes with the last that holds it: a run under way, or a
// compiled program, which may be handed to XLA and not have begun. Until then it is found, since those may
// want another program.
class Registry {
 public:
  static Registry& Global();

  int64_t Add(std::shared_ptr<Plan> plan);
  Result<std::shared_ptr<Plan>> Find(int64_t id) const;
  Status Free(int64_t id);
  // Frees all, and closes those that others hold.
  void Clear();
  size_t size() const;  // plans that were not freed

 private:
  struct Entry {
    std::shared_ptr<Plan> owned;  // until it is freed
    std::weak_ptr<Plan> plan;
  };
  mutable std::mutex mutex_;
  std::unordered_map<int64_t, Entry> plans_;
  int64_t next_id_ = 1;
};

}  // namespace dynaflow
