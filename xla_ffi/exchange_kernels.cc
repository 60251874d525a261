#include "xla_ffi/exchange_kernels.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace dynaflow::cuda {
namespace {

constexpr unsigned kSumBlocksPerMultiprocessor = 2;  // enough for the link

}  // namespace

Result<std::shared_ptr<const ExchangeKernels>> ExchangeKernels::Of(const Driver& driver, Context context) {
  static std::mutex mutex;
  static auto& loaded =
      *new std::map<std::pair<const Driver*, Context>, std::weak_ptr<const ExchangeKernels>>;
  if (!driver.ModuleLoad || !driver.ModuleUnload || !driver.ModuleGetFunction || !driver.AddKernelNode) {
    return Unimplemented("the CUDA driver is too old for nodes with a kernel of our own");
  }
  std::lock_guard lock(mutex);
  std::weak_ptr<const ExchangeKernels>& entry = loaded[{&driver, context}];
  if (auto kernels = entry.lock()) return kernels;
  std::shared_ptr<ExchangeKernels> kernels(new ExchangeKernels(driver, context));
  Device device = 0;
  int count = 0, major = 0;
  DYNAFLOW_CUDA(driver, ContextGetDevice, &device);
  DYNAFLOW_CUDA(driver, DeviceGetAttribute, &count, kAttributeSmCount, device);
  DYNAFLOW_CUDA(driver, DeviceGetAttribute, &major, kAttributeMajor, device);
  Module module = nullptr;
  DYNAFLOW_CUDA(driver, ModuleLoad, &module, ExchangePtx(major).c_str());
  kernels->module_ = OwnedModule(module, {&driver});
  DYNAFLOW_CUDA(driver, ModuleGetFunction, &kernels->flags_, module, kFlagsKernel);
  for (Element element : {Element::kFloat32, Element::kBFloat16}) {
    for (bool with_norm : {false, true}) {
      Function& sum = kernels->sums_[static_cast<size_t>(element)][with_norm];
      DYNAFLOW_CUDA(driver, ModuleGetFunction, &sum, module, SumKernel(element, with_norm).c_str());
    }
  }
  kernels->multiprocessors_ = static_cast<unsigned>(count);
  entry = kernels;
  return std::shared_ptr<const ExchangeKernels>(std::move(kernels));
}

ExchangeKernels::~ExchangeKernels() {
  const ScopedContext scope(driver_, context_);  // whoever drops them may be about something else
  module_.reset();
}

Result<GraphNode> ExchangeKernels::AddFlags(Graph graph, std::span<const GraphNode> after,
                                            std::span<const Command> flags) const {
  uint64_t addresses[kMaxFlags] = {};
  uint32_t kinds[kMaxFlags] = {};
  uint32_t groups = 1;
  for (size_t i = 0; i < flags.size(); ++i) {
    if (i && flags[i].kind != flags[i - 1].kind) ++groups;
    addresses[i] = flags[i].writes[0].offset;
    kinds[i] = 2 * (groups - 1) + (flags[i].kind == CommandKind::kAwait);
  }
  for (size_t i = flags.size(); i < kMaxFlags; ++i) kinds[i] = 2 * groups;  // no turn
  void* params[] = {addresses, kinds, &groups};
  return AddNode(graph, after, flags_, 1, kMaxFlags, params);
}

size_t ExchangeKernels::FlagsAhead(std::span<const Command> flags) {
  size_t count[2] = {};  // of awaits, of signals
  auto at = flags.rbegin();
  for (const CommandKind kind : {CommandKind::kAwait, CommandKind::kSignal}) {
    size_t& found = count[kind == CommandKind::kSignal];
    while (at != flags.rend() && at->kind == kind && found < kMaxFlags) ++found, ++at;
  }
  return count[0] + count[1];
}

// What a sum's kernel is given.
struct ExchangeKernels::SumParams {
  SumParams(std::span<const Command> flags, const Command& sum)
      : total(sum.writes[0].offset),
        bytes(sum.writes[0].bytes),
        num_parts(static_cast<uint32_t>(NumSummands(sum))) {
    for (size_t i = 0; i < num_parts; ++i) parts[i] = sum.reads[i].offset;
    for (const Command& c : flags) {
      if (c.kind == CommandKind::kSignal) {
        signals[num_signals++] = c.writes[0].offset;
      } else {
        awaits[num_awaits++] = c.writes[0].offset;
      }
    }
    if (!sum.norm) return;
    if (sum.norm->residual) residual = sum.reads[num_parts].offset;
    if (sum.norm->weight) weight = sum.reads.back().offset;
    normed = sum.writes[1].offset;
    pieces = static_cast<uint32_t>(RowBytes(sum, *sum.norm) / kSumBytes);
    inverse_width = 1.0f / static_cast<float>(sum.norm->width);
    epsilon = sum.norm->epsilon;
    wide_weight = sum.norm->weight && sum.norm->weight != sum.element;
    rounds_scale = sum.norm->rounds_scale;
    rounds_normed = sum.norm->rounds_normed;
  }

  // A norm's threads share its row; they are whole warps, one for signals and one for awaits at least.
  unsigned Threads() const {
    return pieces ? std::clamp((pieces + 31) / 32 * 32, 64u, kMaxSumThreads) : kMaxSumThreads;
  }

  // Blocks enough to have much of what is far away under way at once.
  unsigned Blocks(unsigned multiprocessors) const {
    const uint64_t each = kSumBytes * (pieces ? pieces : kMaxSumThreads);
    const uint64_t most = uint64_t{kSumBlocksPerMultiprocessor} * std::max(multiprocessors, 1u);
    return static_cast<unsigned>(std::clamp<uint64_t>((bytes + each - 1) / each, 1, most));
  }

  uint64_t total, bytes;
  uint64_t parts[kMaxSummands] = {};
  uint32_t num_parts;
  uint64_t signals[kMaxFlags] = {};
  uint32_t num_signals = 0;
  uint64_t awaits[kMaxFlags] = {};
  uint32_t num_awaits = 0;
  uint64_t residual = 0, weight = 0, normed = 0;
  uint32_t pieces = 0;  // of 16 bytes, in a row
  float inverse_width = 0, epsilon = 0;
  uint32_t wide_weight = 0, rounds_scale = 0, rounds_normed = 0;
  void* pointers[17] = {&total,         &bytes,      parts,        &num_parts,    signals,       &num_signals,
                        awaits,         &num_awaits, &residual,    &weight,       &normed,       &pieces,
                        &inverse_width, &epsilon,    &wide_weight, &rounds_scale, &rounds_normed};
};

Result<GraphNode> ExchangeKernels::AddSum(Graph graph, std::span<const GraphNode> after,
                                          std::span<const Command> flags, const Command& sum,
                                          int priority) const {
  SumParams params(flags, sum);
  DYNAFLOW_ASSIGN(const GraphNode node, AddNode(graph, after, SumOf(sum), params.Blocks(multiprocessors_),
                                                params.Threads(), params.pointers));
  if (priority) {
    LaunchAttributeValue value{};
    value.priority = priority;
    DYNAFLOW_CUDA(driver_, KernelNodeSetAttribute, node, kAttributePriority, &value);
  }
  return node;
}

Status ExchangeKernels::LaunchSum(const Command& sum, Stream stream) const {
  SumParams params({}, sum);
  const LaunchConfig config{.grid_x = params.Blocks(multiprocessors_),
                            .grid_y = 1,
                            .grid_z = 1,
                            .block_x = params.Threads(),
                            .block_y = 1,
                            .block_z = 1,
                            .shared_bytes = 0,
                            .stream = stream,
                            .attributes = nullptr,
                            .num_attributes = 0};
  DYNAFLOW_CUDA(driver_, LaunchKernel, &config, SumOf(sum), params.pointers, nullptr);
  return {};
}

Result<GraphNode> ExchangeKernels::AddNode(Graph graph, std::span<const GraphNode> after, Function function,
                                           unsigned blocks, unsigned threads, void** params) const {
  const KernelNodeParams node{.function = function,
                              .grid_x = blocks,
                              .grid_y = 1,
                              .grid_z = 1,
                              .block_x = threads,
                              .block_y = 1,
                              .block_z = 1,
                              .shared_bytes = 0,
                              .params = params,
                              .extra = nullptr,
                              .kernel = nullptr,
                              .context = context_};
  GraphNode added = nullptr;
  DYNAFLOW_CUDA(driver_, AddKernelNode, &added, graph, after.data(), after.size(), &node);
  return added;
}

}  // namespace dynaflow::cuda
