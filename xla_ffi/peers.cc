#include "xla_ffi/peers.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <mutex>

namespace dynaflow {
namespace {

bool HasEnded(int pidfd) {
  pollfd entry{.fd = pidfd, .events = POLLIN, .revents = 0};
  return poll(&entry, 1, 0) > 0;
}

}  // namespace

Status Peers::Check(size_t process) const {
  const Process& p = processes_[process];
  // In this order: a process that says why it failed may end right afterwards.
  const bool ended = HasEnded(p.pidfd);
  if (p.notice->failed.load(std::memory_order_acquire)) {
    return Internal(p.name, ": ", std::string(p.notice->why, strnlen(p.notice->why, sizeof(p.notice->why))));
  }
  if (ended) return Internal(p.name, " has ended");
  return {};
}

Status Peers::Check() const {
  for (size_t i = 0; i < processes_.size(); ++i) DYNAFLOW_RETURN_IF_ERROR(Check(i));
  return {};
}

Status Peers::Late(size_t process) const {
  return Internal(processes_[process].name, " is alive, but did not answer within ", timeout_,
                  " s: all processes have to run the same programs in the same order");
}

Status Peers::Late() const {
  if (processes_.size() == 1) return Late(0);
  return Internal("all other processes are alive, but one of them did not answer within ", timeout_,
                  " s: all processes have to run the same programs in the same order");
}

void Peers::Fail(const Status& why) const {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (own_->failed.load(std::memory_order_relaxed)) return;
  const std::string& text = why.message();
  size_t size = std::min(text.size(), sizeof(own_->why) - 1);
  const auto within_character = [&] { return size < text.size() && (text[size] & 0xC0) == 0x80; };
  while (size > 0 && within_character()) --size;
  std::memcpy(own_->why, text.data(), size);
  own_->why[size] = '\0';
  own_->failed.store(1, std::memory_order_release);
}

}  // namespace dynaflow
