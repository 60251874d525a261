// The text of the kernels of `exchange_kernels.h`, in PTX, which the driver compiles: so that nothing is
// needed to build them, and the text depends on the device only in how it rounds.
#pragma once

#include <cstddef>
#include <string>

#include "xla_ffi/program.h"

namespace dynaflow::cuda {

inline constexpr size_t kMaxFlags = 32;  // in a kernel of flags, and of each kind in a sum: a thread for each
inline constexpr unsigned kMaxSumThreads = 512;
inline constexpr unsigned kMaxRowPieces = 4;  // of 16 bytes, that a thread has of a row

// All kernels, for devices of a compute capability with this major number, 7 or more.
std::string ExchangePtx(int major);

// Takes the addresses of up to 32 flags, each one's kind and turn, and how many turns there are.
inline constexpr char kFlagsKernel[] = "dynaflow_flags";

// Takes the members of SumParams in their order: those of a norm are its last ones.
std::string SumKernel(Element element, bool with_norm);

}  // namespace dynaflow::cuda
