#include "xla_ffi/host_flags.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace dynaflow {
namespace {

// Between two looks at a flag that another process sets.
constexpr std::chrono::microseconds kLookAgain(100);

// One for all flags: which of them a waiter has in mind is only known by address, and a flag has no room for
// more than its value.
struct Bell {
  std::mutex mutex;
  std::condition_variable rung;
};

Bell& TheBell() {
  static Bell& bell = *new Bell;  // never destroyed: XLA's threads may still run while the process exits
  return bell;
}

std::atomic_ref<uint32_t> AsFlag(void* flag) { return std::atomic_ref(*static_cast<uint32_t*>(flag)); }

}  // namespace

void SetFlag(void* flag) {
  Bell& bell = TheBell();
  {
    std::lock_guard lock(bell.mutex);  // not between a waiter's look and its sleep
    AsFlag(flag).store(1, std::memory_order_release);
  }
  bell.rung.notify_all();
}

bool TakeFlag(void* flag, const std::function<bool()>& stopped,
              std::chrono::steady_clock::time_point deadline, bool from_another_process) {
  Bell& bell = TheBell();
  const auto set = [&] { return AsFlag(flag).load(std::memory_order_acquire) != 0; };
  std::unique_lock lock(bell.mutex);
  const auto done = [&] { return set() || stopped(); };
  if (from_another_process) {
    for (auto now = std::chrono::steady_clock::now(); now < deadline && !done();
         now = std::chrono::steady_clock::now()) {
      bell.rung.wait_until(lock, std::min(deadline, now + kLookAgain));
    }
  } else {
    bell.rung.wait_until(lock, deadline, done);
  }
  if (!set()) return false;
  AsFlag(flag).store(0, std::memory_order_relaxed);
  return true;
}

void WakeFlagWaiters() {
  Bell& bell = TheBell();
  {
    std::lock_guard lock(bell.mutex);
  }  // as in SetFlag
  bell.rung.notify_all();
}

}  // namespace dynaflow
