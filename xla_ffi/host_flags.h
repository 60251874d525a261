// Flags in host memory, by which the threads that stand for different devices wait for one another, also
// those of different processes.
#pragma once

#include <chrono>
#include <functional>

namespace dynaflow {

// Sets the flag, 4 bytes, after all that the calling thread has done before.
void SetFlag(void* flag);

// Waits, without using the processor, until the flag is set, clears it and returns true; returns false as
// soon as `stopped` returns true and the flag is not set even then, or at the deadline.
// `from_another_process`: the flag is in memory that processes share, and nothing here tells when another one
// sets it, or when that changes what `stopped` looks at: both are looked at again and again.
bool TakeFlag(void* flag, const std::function<bool()>& stopped,
              std::chrono::steady_clock::time_point deadline, bool from_another_process = false);

// To be called when what a `stopped` looks at has changed.
void WakeFlagWaiters();

}  // namespace dynaflow
