#include "xla_ffi/cuda_driver.h"

#include <dlfcn.h>

namespace dynaflow::cuda {
namespace {

Result<const Driver*> Load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return Unimplemented("there is no CUDA driver: ", dlerror());
  static Driver driver;
  const char* missing = nullptr;
#define DYNAFLOW_FIND(name, symbol, ...) \
  driver.name = reinterpret_cast<decltype(driver.name)>(dlsym(library, symbol));
#define DYNAFLOW_NEED(name, symbol, ...) \
  DYNAFLOW_FIND(name, symbol)            \
  if (driver.name == nullptr) missing = symbol;
  DYNAFLOW_CUDA_DRIVER(DYNAFLOW_NEED, DYNAFLOW_FIND)
#undef DYNAFLOW_NEED
#undef DYNAFLOW_FIND
  if (missing) return Unimplemented("the CUDA driver is too old: it lacks ", missing);
  DYNAFLOW_RETURN_IF_ERROR(driver.Check(driver.Init(0), "cuInit"));
  return &driver;
}

}  // namespace

Result<const Driver*> Driver::Get() {
  static const Result<const Driver*> result = Load();
  return result;
}

Status Driver::Check(int result, const char* call) const {
  if (result == kSuccess) return {};
  const char *name = nullptr, *text = nullptr;
  GetErrorName(result, &name);
  GetErrorString(result, &text);
  return Internal(call, " failed: ", name ? name : "unknown error", " (", result, text ? ", " : "",
                  text ? text : "", ")");
}

Result<OwnedEvent> MakeEvent(const Driver& driver, unsigned flags) {
  Event event = nullptr;
  DYNAFLOW_CUDA(driver, EventCreate, &event, flags);
  return OwnedEvent(event, {&driver});
}

Result<PrimaryContext> PrimaryContext::Retain(const Driver& driver, int ordinal) {
  PrimaryContext primary;
  DYNAFLOW_CUDA(driver, DeviceGet, &primary.device_, ordinal);
  DYNAFLOW_CUDA(driver, PrimaryContextRetain, &primary.context_, primary.device_);
  primary.driver_ = &driver;
  return primary;
}

Result<int> SmCount(const Driver& driver, int ordinal) {
  Device device;
  int count = 0;
  DYNAFLOW_CUDA(driver, DeviceGet, &device, ordinal);
  DYNAFLOW_CUDA(driver, DeviceGetAttribute, &count, kAttributeSmCount, device);
  return count;
}

Status Synchronize(const Driver& driver, Stream stream) {
  Context context = nullptr;
  DYNAFLOW_CUDA(driver, StreamGetContext, stream, &context);
  const ScopedContext scope(driver, context);
  DYNAFLOW_RETURN_IF_ERROR(scope.status());
  DYNAFLOW_CUDA(driver, StreamSynchronize, stream);
  return {};
}

Result<int> DeviceOf(const Driver& driver, Stream stream) {
  Context context = nullptr;
  Device device = 0;
  DYNAFLOW_CUDA(driver, StreamGetContext, stream, &context);
  const ScopedContext scope(driver, context);
  DYNAFLOW_RETURN_IF_ERROR(scope.status());
  DYNAFLOW_CUDA(driver, ContextGetDevice, &device);
  return device;  // a CUdevice is its ordinal
}

}  // namespace dynaflow::cuda
