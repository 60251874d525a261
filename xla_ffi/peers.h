// The other processes that run a plan together with this one, on the same host.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "xla_ffi/status.h"

namespace dynaflow {

// What a process has to say about a plan, in memory that all processes of the plan share. All zero until
// something fails.
struct Notice {
  std::atomic<uint32_t> failed;
  char why[1020];  // ends with a zero; written before `failed` is set
};
static_assert(std::atomic<uint32_t>::is_always_lock_free,
              "an atomic in shared memory has no lock of its own");

// Thread-safe.
class Peers {
 public:
  struct Process {
    std::string name;      // for messages
    int pidfd;             // of pidfd_open; tells when the process has ended
    const Notice* notice;  // what it writes
  };

  // `own`: the notice of this process. `timeout`: how long, in seconds, a process that is alive is waited
  // for. `keep_alive`: what owns the memory and the descriptors.
  Peers(Notice* own, std::vector<Process> processes, double timeout,
        std::shared_ptr<void> keep_alive = nullptr)
      : own_(own), processes_(std::move(processes)), timeout_(timeout), keep_alive_(std::move(keep_alive)) {}

  size_t size() const { return processes_.size(); }
  double timeout() const { return timeout_; }

  // What has become of a process: success while it lives and has not failed.
  Status Check(size_t process) const;
  // What has become of the first of them for which that is not success.
  Status Check() const;
  // That a process, though alive, did not answer in time.
  Status Late(size_t process) const;
  Status Late() const;

  // Tells the others that the plan has failed here; the first time counts.
  void Fail(const Status& why) const;

 private:
  Notice* const own_;
  const std::vector<Process> processes_;
  const double timeout_;
  const std::shared_ptr<void> keep_alive_;
};

}  // namespace dynaflow
