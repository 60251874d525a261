// Sums in host memory.
#pragma once

#include "xla_ffi/device.h"
#include "xla_ffi/program.h"

namespace dynaflow {

// Does what a sum says, with the same bits as the kernel for GPUs, but for those of a NaN of float32 and of
// norms: there squares are added up in another order, their sum is multiplied with one over the width, and
// the root is an approximation.
void HostSum(const Command& sum, const Call& call);

}  // namespace dynaflow
