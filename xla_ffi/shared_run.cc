#include "xla_ffi/shared_run.h"

#include <utility>

#include "xla_ffi/host_flags.h"

namespace dynaflow {

void SharedRun::Fail(Status status) {
  {
    std::lock_guard lock(mutex_);
    if (failed_) return;
    error_ = std::move(status);
    failed_ = true;
  }
  WakeFlagWaiters();
}

Status SharedRun::status() const {
  std::lock_guard lock(mutex_);
  return error_;
}

}  // namespace dynaflow
