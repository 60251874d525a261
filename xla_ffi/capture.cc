#include "xla_ffi/capture.h"

namespace dynaflow {
namespace {

std::vector<uint64_t> Addresses(std::span<void* const> pointers) {
  std::vector<uint64_t> addresses;
  for (void* p : pointers) addresses.push_back(reinterpret_cast<uint64_t>(p));
  return addresses;
}

}  // namespace

Captures& Captures::Global() {
  static Captures& captures = *new Captures;  // never destroyed, like Registry::Global
  return captures;
}

Status Captures::Begin(const cuda::Driver& driver, cuda::Stream stream, int64_t id,
                       std::span<void* const> inputs) {
  std::lock_guard lock(mutex_);
  if (entries_.contains(id)) return FailedPrecondition("capture ", id, " exists already");
  // Relaxed: other threads, XLA's own among them, go on allocating and launching meanwhile.
  DYNAFLOW_RETURN_IF_ERROR(
      driver.Check(driver.StreamBeginCapture(stream, cuda::kCaptureRelaxed), "StreamBeginCapture")
          .Within([&] { return StrCat("capture ", id); }));
  auto capture = std::make_shared<Capture>();
  capture->inputs = Addresses(inputs);
  entries_.emplace(id, Entry{&driver, stream, std::move(capture)});
  return {};
}

Status Captures::End(const cuda::Driver& driver, cuda::Stream stream, int64_t id,
                     std::span<void* const> outputs) {
  std::lock_guard lock(mutex_);
  const auto it = entries_.find(id);
  if (it == entries_.end()) return FailedPrecondition("capture ", id, " ends but was not begun");
  Entry& entry = it->second;
  if (entry.stream == nullptr) return FailedPrecondition("capture ", id, " ends a second time");
  if (entry.stream != stream)
    return FailedPrecondition("capture ", id, " ends on another stream than it began on");
  cuda::Graph graph = nullptr;
  const Status ended = driver.Check(driver.StreamEndCapture(stream, &graph), "StreamEndCapture");
  if (!ended.ok()) {
    entries_.erase(it);
    return ended.Within([&] { return StrCat("capture ", id); });
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
