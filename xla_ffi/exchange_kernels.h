// The kernels of our own that exchanges are made of: flags, and sums of what other devices have computed.
//
// Flags: a node with a kernel of one warp takes half as long as one of the driver's memory operations (on an
// H200 1.7 against 3.1 us, with the flag set already): a decoding step of 32 layers on two GPUs went
// from 6.06 to 5.67 ms. But the kernel has a place on a multiprocessor for as long as it waits.
//
// Sums: a small all-reduce is one kernel, whose blocks wait for the flags themselves and then read the other
// devices' memory. With the flags and XLA's addition as kernels of their own it would be two starts more, and
// with the residual and the norm behind it (TokenWeave, arXiv 2505.11329, section 4) another one or two.
#pragma once

#include <memory>
#include <span>

#include "xla_ffi/cuda_driver.h"
#include "xla_ffi/exchange_ptx.h"
#include "xla_ffi/program.h"
#include "xla_ffi/status.h"

namespace dynaflow::cuda {

class ExchangeKernels {
 public:
  ~ExchangeKernels();

  // The kernels on the device whose primary context this is, and is current. All that hold them share them.
  static Result<std::shared_ptr<const ExchangeKernels>> Of(const Driver& driver, Context context);

  // A node that does what the commands say, in their order: signals and awaits, at most kMaxFlags.
  Result<GraphNode> AddFlags(Graph graph, std::span<const GraphNode> after,
                             std::span<const Command> flags) const;

  // How many of the flags right ahead of a sum its node can do as well: signals and, behind them, awaits, at
  // most kMaxFlags of each.
  static size_t FlagsAhead(std::span<const Command> flags);

  // A node that does these flags, and then the sum.
  Result<GraphNode> AddSum(Graph graph, std::span<const GraphNode> after, std::span<const Command> flags,
                           const Command& sum, int priority) const;

  Status LaunchSum(const Command& sum, Stream stream) const;

 private:
  struct SumParams;

  ExchangeKernels(const Driver& driver, Context context) : driver_(driver), context_(context) {}
  Result<GraphNode> AddNode(Graph graph, std::span<const GraphNode> after, Function function, unsigned blocks,
                            unsigned threads, void** params) const;
  Function SumOf(const Command& sum) const {
    return sums_[static_cast<size_t>(sum.element)][sum.norm.has_value()];
  }

  const Driver& driver_;
  const Context context_;
  OwnedModule module_;
  Function flags_ = nullptr;
  Function sums_[kNumElements][2] = {};  // without a norm, and with one
  unsigned multiprocessors_ = 0;
};

}  // namespace dynaflow::cuda
