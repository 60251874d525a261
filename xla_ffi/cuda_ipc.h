// Device memory that processes of one host share.
#pragma once

#include <cstddef>
#include <string_view>

#include "xla_ffi/cuda_driver.h"
#include "xla_ffi/status.h"

namespace dynaflow::cuda {

struct SharedBlock {
  DevicePtr address = 0;
  IpcHandle handle{};  // by which another process opens it
};

// Zeroed memory of its own, not from any pool: pools may hold memory that cannot be shared. It stays until
// the process ends, since to free what another process has open is undefined.
Result<SharedBlock> AllocateShared(const Driver& driver, int ordinal, size_t bytes);

// Makes all of a block zero again; over when it returns.
Status ClearShared(const Driver& driver, int ordinal, DevicePtr address, size_t bytes);

// Another process's block, as a device of this process reaches it. To be opened once by each device.
Result<DevicePtr> OpenShared(const Driver& driver, int ordinal, std::string_view handle);

}  // namespace dynaflow::cuda
