// A device's SMs, shared out among streams.
#pragma once

#include <vector>

#include "xla_ffi/cuda_driver.h"
#include "xla_ffi/status.h"

namespace dynaflow::cuda {

// One green context for each budget, on SMs that no other of them has. Budgets are rounded up to what the
// hardware can separate (8 SMs on Hopper), and the largest may get less than one such piece too few. Fails
// when there are not enough.
Result<std::vector<OwnedGreenContext>> ShareOutSms(const Driver& driver, Device device,
                                                   const std::vector<unsigned>& budgets);

}  // namespace dynaflow::cuda
