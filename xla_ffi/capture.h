// Graphs captured from XLA's own execution of a partition.
//
// The partition's module runs once in the private client: a custom call at its start opens a stream capture
// on XLA's stream, one at its end closes it, and what XLA launched between them is the graph. Nothing was
// executed; the executable that owns the kernels, and the buffers, must outlive the graph.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "xla_ffi/cuda_driver.h"
#include "xla_ffi/status.h"

namespace dynaflow {

// Pointers as the numbers that Python knows them by.
std::vector<uint64_t> Addresses(std::span<void* const> pointers);

struct Capture {
  cuda::OwnedGraph graph;
  std::vector<uint64_t> inputs;   // addresses, as passed to the opening call
  std::vector<uint64_t> outputs;  // as passed to the closing call
};

// Captures by id. Thread-safe. Programs share ownership, so freeing an id is safe while one still runs.
class Captures {
 public:
  static Captures& Global();

  // The id of the next capture to begin. It is told here, and not by the module that is about to run, so that
  // one module can be captured many times: at each layer's weights, say. One capture at a time is the
  // caller's to see to.
  Status Expect(int64_t id);
  Status Begin(const cuda::Driver& driver, cuda::Stream stream, std::span<void* const> inputs);
  // Ends the capture that is open on the stream.
  Status End(const cuda::Driver& driver, cuda::Stream stream, std::span<void* const> outputs);

  // The finished capture.
  Result<std::shared_ptr<const Capture>> Find(int64_t id) const;

  // Forgets a capture, or that one was expected. One that is still open (its module failed half-way) is ended
  // first, which gives XLA its stream back.
  Status Free(int64_t id);
  void Clear();

 private:
  struct Entry {
    const cuda::Driver* driver;
    cuda::Stream stream;  // while open; null once finished
    std::shared_ptr<Capture> capture;
  };

  mutable std::mutex mutex_;
  std::optional<int64_t> expected_;
  std::unordered_map<int64_t, Entry> entries_;
};

}  // namespace dynaflow
