// A whole program as one CUDA graph, and so one launch.
#pragma once

#include <memory>
#include <vector>

#include "xla_ffi/cuda_driver.h"
#include "xla_ffi/device.h"
#include "xla_ffi/exchange_kernels.h"
#include "xla_ffi/stopwatch.h"

namespace dynaflow::cuda {

// What a copy command does, in CUDA's terms.
Memcpy3D CopyOf(const Command& c, DevicePtr dst, DevicePtr src);

class ProgramGraph {
 public:
  // `kernels`: those of the context. Sums need them; without, all flags are the driver's operations.
  // `partitions`: the graph to launch for each command that launches one, null for the others.
  // `stopwatch`: whose events to record before and after each command; null: none.
  static Result<ProgramGraph> Build(const Driver& driver, Context context,
                                    std::shared_ptr<const ExchangeKernels> kernels, const Program& program,
                                    const std::vector<Graph>& partitions, const Call& call,
                                    Stopwatch* stopwatch = nullptr);

  // Launches it on `stream`, after pointing its copies at this call's inputs and outputs.
  Status Launch(const Program& program, const Call& call, Stream stream);

 private:
  class Builder;

  // A copy of a moving input, or to an output: the one kind of node that changes between calls.
  struct MovingCopy {
    size_t command;
    GraphNode node;
    DevicePtr dst, src;  // as the graph has them now
  };

  const Driver* driver_ = nullptr;
  Context context_ = nullptr;
  std::shared_ptr<const ExchangeKernels> kernels_;  // outlive the graph
  OwnedGraph graph_;                                // nodes are found through it
  OwnedGraphExec exec_;
  std::vector<MovingCopy> moving_;
};

}  // namespace dynaflow::cuda
