// A program on a GPU: XLA's kernels, replayed on streams of our own.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "xla_ffi/capture.h"
#include "xla_ffi/cuda_driver.h"
#include "xla_ffi/device.h"
#include "xla_ffi/exchange_kernels.h"
#include "xla_ffi/program_graph.h"
#include "xla_ffi/stopwatch.h"

namespace dynaflow {

struct CudaOptions {
  // Run the whole program as one graph where nothing prevents it, instead of command by command.
  bool one_graph = true;
  // Wait for each operator before the next. Slow, but a device error then names the operator that caused it,
  // where otherwise it shows up at some later call.
  bool blocking = false;
  // Take the time of every command, with events before and after it.
  bool timed = false;
};

class CudaDevice final : public Device {
 public:
  // `ordinals`: the CUDA ordinal of each of the program's devices, the one to run on first; kElsewhere for a
  // device of another process, whose memory this device reaches already.
  // `captures`: one for each of the program's partitions.
  static Result<std::unique_ptr<Device>> Create(const cuda::Driver& driver, std::vector<int> ordinals,
                                                const Program& program,
                                                std::vector<std::shared_ptr<const Capture>> captures,
                                                const CudaOptions& options);
  static constexpr int kElsewhere = -1;
  ~CudaDevice() override;

  Status Run(const Program& program, const Call& call) override;
  Result<std::vector<CommandTime>> Times(const Program& program) override;
  std::string Mode() const override;
  void Release(const Program& program) override;
  bool Idle() const override;
  Status Failure(const Program& program) override;

 private:
  struct DeviceTurn;

  CudaDevice(const cuda::Driver& driver, const CudaOptions& options) : driver_(driver), options_(options) {}
  static std::shared_ptr<DeviceTurn> TurnOf(const cuda::Driver& driver, int ordinal);

  Status Prepare(const std::vector<int>& ordinals, const Program& program);
  Status CreateStreams(const Program& program);
  Status ConnectPeers(const Program& program);
  Status ConnectPeer(uint32_t device, bool must_reach);
  Status PreparePartitions(const Program& program);
  Status LoadKernels(const Program& program);
  Status InstantiatePartitions(const Program& program);

  Status CheckEarlierRuns(const Program& program);
  Status RunAsOneGraph(const Program& program, const Call& call, cuda::Stream stream);
  Status RunOnStreams(const Program& program, const Call& call, cuda::Stream stream);
  Status Issue(const Program& program, size_t command, const Call& call);

  const cuda::Driver& driver_;
  const CudaOptions options_;
  std::vector<cuda::PrimaryContext> contexts_;  // of each of the program's devices; none if it is elsewhere
  std::vector<std::shared_ptr<const Capture>> captures_;
  std::shared_ptr<DeviceTurn> turn_;

  // Made in this order, destroyed in the opposite one.
  std::vector<cuda::OwnedGreenContext> green_contexts_;
  std::vector<cuda::OwnedStream> streams_;
  cuda::OwnedStream release_;                 // to set the awaited flags on, if any are
  std::vector<cuda::OwnedEvent> events_;      // the program's
  std::vector<cuda::OwnedEvent> joins_;       // the end of each stream's work
  cuda::OwnedEvent fork_;                     // the start of a run, on XLA's stream
  std::shared_ptr<cuda::OwnedEvent> done_;    // the end of a run, likewise; the next in turn may wait for it
  std::optional<cuda::Stopwatch> stopwatch_;  // of a timed program
  std::vector<cuda::OwnedGraph> own_graphs_;  // captures changed for a stream's priority or SMs
  std::vector<cuda::Graph> graphs_;           // of each command that launches one
  std::vector<cuda::OwnedGraphExec> execs_;   // the same, ready to launch, unless all is one graph
  std::shared_ptr<const cuda::ExchangeKernels> kernels_;  // if there is a use for them
  std::optional<cuda::ProgramGraph> whole_;

  std::string why_not_one_graph_;      // empty: the program runs as one graph
  std::atomic<bool> has_run_ = false;  // also looked at during a run
  bool has_times_ = false;             // of the last run
};

}  // namespace dynaflow
