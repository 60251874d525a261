// A process that runs out of threads, for tests. To be included by one file of a test.
#pragma once

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>

namespace dynaflow {

// How many threads can still be started; below zero: any number.
inline std::atomic<int> threads_left = -1;

// While it lives, only so many threads can be started.
class ThreadLimit {
 public:
  explicit ThreadLimit(int count) { threads_left = count; }
  ~ThreadLimit() { threads_left = -1; }
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;
};

}  // namespace dynaflow

// Found ahead of the C library's by all that starts a thread.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                              void* argument) noexcept {
  if (dynaflow::threads_left == 0) return EAGAIN;
  if (dynaflow::threads_left > 0) --dynaflow::threads_left;
  static const auto create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return create(thread, attributes, start, argument);
}
