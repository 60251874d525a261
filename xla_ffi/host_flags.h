// Flags in host memory, by which the threads that stand for different devices wait for one another.
#pragma once

#include <chrono>
#include <functional>

namespace dynaflow {

// Sets the flag, 4 bytes, after all that the calling thread has done before.
void SetFlag(void* flag);

// Waits, without using the processor, until the flag is set, clears it and returns true; returns false as
// soon as `stopped` does, or at the deadline.
bool TakeFlag(void* flag, const std::function<bool()>& stopped,
              std::chrono::steady_clock::time_point deadline);

// To be called when what a `stopped` looks at has changed.
void WakeFlagWaiters();

}  // namespace dynaflow
