// What the devices of one run have in common while it is under way.
#pragma once

#include <atomic>
#include <mutex>

#include "xla_ffi/status.h"

namespace dynaflow {

// How a run that several devices take part in has failed, if it has. Thread-safe.
class SharedRun {
 public:
  // The first failure is the cause; later ones may be its consequences and are dropped. Whoever waits for a
  // flag of host memory is woken to look at this.
  void Fail(Status status);

  bool failed() const { return failed_; }
  Status status() const;

 private:
  std::atomic<bool> failed_ = false;
  mutable std::mutex mutex_;
  Status error_;
};

}  // namespace dynaflow
