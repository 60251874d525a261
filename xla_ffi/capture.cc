#include "xla_ffi/capture.h"

#include <algorithm>
#include <utility>

namespace dynaflow {

std::vector<uint64_t> Addresses(std::span<void* const> pointers) {
  std::vector<uint64_t> addresses;
  for (void* p : pointers) addresses.push_back(reinterpret_cast<uint64_t>(p));
  return addresses;
}

Captures& Captures::Global() {
  static Captures& captures = *new Captures;  // never destroyed, like Registry::Global
  return captures;
}

Status Captures::Expect(int64_t id) {
  std::lock_guard lock(mutex_);
  if (entries_.contains(id)) return FailedPrecondition("capture ", id, " exists already");
  expected_ = id;
  return {};
}

Status Captures::Begin(const cuda::Driver& driver, cuda::Stream stream, std::span<void* const> inputs) {
  std::lock_guard lock(mutex_);
  if (!expected_) return FailedPrecondition("a capture begins that nobody expects");
  const int64_t id = *std::exchange(expected_, std::nullopt);
  // Relaxed: other threads, XLA's own among them, go on allocating and launching meanwhile.
  DYNAFLOW_RETURN_IF_ERROR(
      driver.Check(driver.StreamBeginCapture(stream, cuda::kCaptureRelaxed), "StreamBeginCapture")
          .Within([&] { return StrCat("capture ", id); }));
  auto capture = std::make_shared<Capture>();
  capture->inputs = Addresses(inputs);
  entries_.emplace(id, Entry{&driver, stream, std::move(capture)});
  return {};
}

Status Captures::End(const cuda::Driver& driver, cuda::Stream stream, std::span<void* const> outputs) {
  std::lock_guard lock(mutex_);
  const auto it = std::find_if(entries_.begin(), entries_.end(),
                               [&](const auto& entry) { return entry.second.stream == stream; });
  if (it == entries_.end()) return FailedPrecondition("a capture ends that was not begun on this stream");
  auto& [id, entry] = *it;
  cuda::Graph graph = nullptr;
  const Status ended = driver.Check(driver.StreamEndCapture(stream, &graph), "StreamEndCapture");
  if (!ended.ok()) {
    const Status named = ended.Within([&, number = id] { return StrCat("capture ", number); });
    entries_.erase(it);
    return named;
  }
  entry.stream = nullptr;
  entry.capture->graph = cuda::OwnedGraph(graph, {&driver});
  entry.capture->outputs = Addresses(outputs);
  return {};
}

Result<std::shared_ptr<const Capture>> Captures::Find(int64_t id) const {
  std::lock_guard lock(mutex_);
  const auto it = entries_.find(id);
  if (it == entries_.end()) return NotFound("no capture ", id);
  if (it->second.stream) return FailedPrecondition("capture ", id, " is not finished");
  return std::shared_ptr<const Capture>(it->second.capture);
}

Status Captures::Free(int64_t id) {
  std::lock_guard lock(mutex_);
  if (expected_ == id) {
    expected_.reset();
    return {};
  }
  const auto it = entries_.find(id);
  if (it == entries_.end()) return NotFound("no capture ", id, " to free");
  const Entry entry = std::move(it->second);
  entries_.erase(it);
  if (entry.stream) {
    cuda::Graph graph = nullptr;
    // The capture is abandoned, and with it whatever its end has to say.
    if (entry.driver->StreamEndCapture(entry.stream, &graph) == cuda::kSuccess && graph) {
      entry.capture->graph = cuda::OwnedGraph(graph, {entry.driver});
    }
  }
  return {};
}

void Captures::Clear() {
  std::unordered_map<int64_t, Entry> freed;
  std::lock_guard lock(mutex_);
  freed.swap(entries_);
}

}  // namespace dynaflow
