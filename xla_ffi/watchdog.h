// Looks after communicating runs once they are launched.
//
// A CUDA device returns from a run as soon as it is enqueued. Where its kernels then fail, its peers wait on
// the device for flags that it will never set, and the host waits for the peers. So do those of other
// processes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "xla_ffi/executor.h"
#include "xla_ffi/peers.h"
#include "xla_ffi/status.h"

namespace dynaflow {

// One for each plan. Its thread begins with the first run that is watched, and sleeps while none is under
// way.
class Watchdog {
 public:
  // A device's part in a run, all of whose devices have launched theirs.
  struct Part {
    int device;
    std::weak_ptr<Executor> executor;
  };

  // `report` is told of a failure, on the watchdog's thread and before any peer is released; after that it is
  // told of no other. `interval`: between two looks. `patience`: how long peers are released, at most.
  Watchdog(std::function<void(const Status&)> report, std::chrono::nanoseconds interval,
           std::chrono::nanoseconds patience)
      : report_(std::move(report)), interval_(interval), patience_(patience) {}
  ~Watchdog();

  // Watches a run until it is over, in place of the one before: a device that fails says so of every later
  // run. `peers`: the other processes that take part, if any do. Where one of them fails or ends, the run may
  // still have all that it needs of it, so it gets as long as `patience` to end by itself. Fails where there
  // is no thread to be had.
  Status Watch(std::vector<Part> run, std::shared_ptr<const Peers> peers = nullptr);

 private:
  using Clock = std::chrono::steady_clock;

  // What is watched.
  struct Run {
    std::vector<Part> parts;  // empty: nothing
    std::shared_ptr<const Peers> peers;
    Clock::time_point began;
    std::optional<Clock::time_point> alone;  // since when it has been without one of the peers
  };

  Status StartThread();
  void Loop();
  bool IsOver(Run& run);
  Status Lost(Run& run) const;
  void Release(const std::vector<Part>& waiting);

  const std::function<void(const Status&)> report_;
  const std::chrono::nanoseconds interval_, patience_;

  std::mutex mutex_;  // for what follows
  std::condition_variable changed_;
  Run run_;
  uint64_t run_number_ = 0;  // of run_
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace dynaflow
