#include "xla_ffi/cuda_ipc.h"

#include <cstring>

namespace dynaflow::cuda {

Result<SharedBlock> AllocateShared(const Driver& driver, int ordinal, size_t bytes) {
  DYNAFLOW_ASSIGN(const PrimaryContext context, PrimaryContext::Retain(driver, ordinal));
  const ScopedContext scope(driver, context.get());
  DYNAFLOW_RETURN_IF_ERROR(scope.status());
  SharedBlock block;
  DYNAFLOW_CUDA(driver, MemAlloc, &block.address, bytes);
  const auto prepare = [&]() -> Status {
    DYNAFLOW_CUDA(driver, IpcGetMemHandle, &block.handle, block.address);
    return ClearShared(driver, ordinal, block.address, bytes);
  };
  const Status status = prepare();
  if (status.ok()) return block;
  driver.MemFree(block.address);  // nobody has it yet
  return status;
}

Status ClearShared(const Driver& driver, int ordinal, DevicePtr address, size_t bytes) {
  DYNAFLOW_ASSIGN(const PrimaryContext context, PrimaryContext::Retain(driver, ordinal));
  const ScopedContext scope(driver, context.get());
  DYNAFLOW_RETURN_IF_ERROR(scope.status());
  // On a stream of its own: the default one waits for whatever other libraries run.
  Stream raw = nullptr;
  DYNAFLOW_CUDA(driver, StreamCreate, &raw, kStreamNonBlocking, 0);
  const OwnedStream stream(raw, {&driver});
  DYNAFLOW_CUDA(driver, MemsetD2D8Async, address, bytes, 0, bytes, 1, stream.get());
  DYNAFLOW_CUDA(driver, StreamSynchronize, stream.get());
  return {};
}

Result<DevicePtr> OpenShared(const Driver& driver, int ordinal, std::string_view handle) {
  IpcHandle opened{};
  if (handle.size() != sizeof(opened.reserved)) {
    return InvalidArgument("a handle of shared memory has ", sizeof(opened.reserved), " bytes, not ",
                           handle.size());
  }
  std::memcpy(opened.reserved, handle.data(), handle.size());
  DYNAFLOW_ASSIGN(const PrimaryContext context, PrimaryContext::Retain(driver, ordinal));
  const ScopedContext scope(driver, context.get());
  DYNAFLOW_RETURN_IF_ERROR(scope.status());
  DevicePtr address = 0;
  DYNAFLOW_CUDA(driver, IpcOpenMemHandle, &address, opened, kIpcLazyEnablePeerAccess);
  return address;
}

}  // namespace dynaflow::cuda
