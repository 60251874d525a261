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

Status Watchdog::Watch(std::vector<Part> run, std::shared_ptr<const Peers> peers) {
  bool sleeping;
  {
    std::lock_guard lock(mutex_);
    DYNAFLOW_RETURN_IF_ERROR(StartThread());
    sleeping = run_.parts.empty();
    run_ = {std::move(run), std::move(peers), Clock::now(), std::nullopt};
    ++run_number_;
  }
  if (sleeping) changed_.notify_all();
  return {};
}

// With mutex_ held; once.
Status Watchdog::StartThread() {
  if (thread_.joinable()) return {};
  const Status started = Caught([this] {
    thread_ = std::thread([this] { Loop(); });
    return Status();
  });
  return started.Within([] { return std::string("cannot start the thread that watches a plan's runs"); });
}

void Watchdog::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !run_.parts.empty(); });
    changed_.wait_for(lock, interval_, [&] { return stopping_; });
    if (stopping_) return;
    Run run = run_;
    const uint64_t number = run_number_;
    lock.unlock();
    const bool over = IsOver(run);
    lock.lock();
    if (number == run_number_) run_ = over ? Run() : std::move(run);
  }
}

// Whether nothing is left to watch: all devices are done with the run, or one has failed and the others were
// released.
bool Watchdog::IsOver(Run& run) {
  std::vector<Part> waiting;
  Status first;
  for (const Part& part : run.parts) {
    const std::shared_ptr<Executor> executor = part.executor.lock();
    if (!executor) continue;  // its destruction has waited for the device
    const Status status = executor->Failure();
    if (!status.ok()) {
      if (first.ok()) first = status.Within([&] { return StrCat("device ", part.device); });
    } else if (!executor->Idle()) {
      waiting.push_back(part);
    }
  }
  if (first.ok() && waiting.empty()) return true;
  if (first.ok()) first = Lost(run);
  if (first.ok()) return false;
  report_(first);
  Release(waiting);
  return true;
}

// Why a run that is under way will not end by itself, as far as that lies with other processes.
Status Watchdog::Lost(Run& run) const {
  if (!run.peers) return {};
  const auto now = Clock::now();
  const Status status = run.peers->Check();
  if (status.ok()) {
    return now - run.began < Seconds(run.peers->timeout()) ? Status() : run.peers->Late();
  }
  if (!run.alone) run.alone = now;
  return now - *run.alone < patience_ ? Status() : status;
}

// A flag may be awaited several times, so it is set until nobody waits any more.
void Watchdog::Release(const std::vector<Part>& waiting) {
  const auto deadline = std::chrono::steady_clock::now() + patience_;
  const auto busy = [](const Part& part) {
    const std::shared_ptr<Executor> executor = part.executor.lock();
    return executor && !executor->Idle();
  };
  while (std::any_of(waiting.begin(), waiting.end(), busy) && std::chrono::steady_clock::now() < deadline) {
    for (const Part& part : waiting) {
      if (const std::shared_ptr<Executor> executor = part.executor.lock()) executor->Release();
    }
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::milliseconds(1), [&] { return stopping_; })) return;
  }
}

}  // namespace dynaflow
