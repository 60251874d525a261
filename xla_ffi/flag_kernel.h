// Flags that a kernel of one warp sets and awaits, as a node of a graph.
//
// Such a node takes half as long as one of the driver's memory operations (on an H200 1.7 against 3.1 us,
// with the flag set already): a decoding step of 32 layers on two GPUs went from 6.06 to 5.67 ms. But the
// kernel has a place on a multiprocessor for as long as it waits.
#pragma once

#include <memory>
#include <span>

#include "xla_ffi/cuda_driver.h"
#include "xla_ffi/program.h"
#include "xla_ffi/status.h"

namespace dynaflow::cuda {

class FlagKernel {
 public:
  static constexpr size_t kMaxFlags = 32;  // of one node: a thread for each

  ~FlagKernel();

  // The kernel on the device whose primary context this is, and is current. All that hold it share it.
  static Result<std::shared_ptr<const FlagKernel>> Of(const Driver& driver, Context context);

  // A node that does what the commands say, in their order: signals and awaits, at most kMaxFlags.
  Result<GraphNode> AddNode(Graph graph, std::span<const GraphNode> after,
                            std::span<const Command> flags) const;

 private:
  FlagKernel(const Driver& driver, Context context) : driver_(driver), context_(context) {}

  const Driver& driver_;
  const Context context_;
  OwnedModule module_;
  Function function_ = nullptr;
};

}  // namespace dynaflow::cuda
