#include "xla_ffi/watchdog.h"

#include <algorithm>
#include <utility>

namespace dynaflow {

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::Watch(std::vector<Part> run) {
  bool sleeping;
  {
    std::lock_guard lock(mutex_);
    sleeping = run_.empty();
    run_ = std::move(run);
    ++run_number_;
    if (!thread_.joinable()) thread_ = std::thread([this] { Loop(); });
  }
  if (sleeping) changed_.notify_all();
}

void Watchdog::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !run_.empty(); });
    changed_.wait_for(lock, interval_, [&] { return stopping_; });
    if (stopping_) return;
    const std::vector<Part> run = run_;
    const uint64_t number = run_number_;
    lock.unlock();
    const bool over = IsOver(run);
    lock.lock();
    if (over && number == run_number_) run_.clear();
  }
}

// Whether nothing is left to watch: all devices are done with the run, or one has failed and the others were
// released.
bool Watchdog::IsOver(const std::vector<Part>& run) {
  std::vector<Part> failed, waiting;
  Status first;
  for (const Part& part : run) {
    const std::shared_ptr<Executor> executor = part.executor.lock();
    if (!executor) continue;  // its destruction has waited for the device
    const Status status = executor->Failure();
    if (!status.ok()) {
      if (first.ok()) first = status.Within([&] { return StrCat("device ", part.device); });
      failed.push_back(part);
    } else if (!executor->Idle()) {
      waiting.push_back(part);
    }
  }
  if (failed.empty()) return waiting.empty();
  report_(first);
  Release(failed, waiting);
  return true;
}

// A flag may be awaited several times, so it is set until nobody waits any more.
void Watchdog::Release(const std::vector<Part>& failed, const std::vector<Part>& waiting) {
  const auto deadline = std::chrono::steady_clock::now() + patience_;
  const auto busy = [](const Part& part) {
    const std::shared_ptr<Executor> executor = part.executor.lock();
    return executor && !executor->Idle();
  };
  while (std::any_of(waiting.begin(), waiting.end(), busy) && std::chrono::steady_clock::now() < deadline) {
    for (const Part& part : failed) {
      if (const std::shared_ptr<Executor> executor = part.executor.lock()) executor->ReleasePeers();
    }
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::milliseconds(1), [&] { return stopping_; })) return;
  }
}

}  // namespace dynaflow
