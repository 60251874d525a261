#include "xla_ffi/exchange_kernels.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace dynaflow::cuda {
namespace {

// Thread i does its one flag when its group's turn comes: kinds[i] is twice the group, and one more for an
// await. Flags are shared with other devices, so all accesses are at the scope of the system. What a signal
// stands for was written by kernels and copies before this node, or read by them; the fence makes the flag
// come after it.
constexpr char kFlags[] = R"(
.version 6.0
.target sm_70
.address_size 64
.visible .entry dynaflow_flags(
  .param .align 8 .b8 addresses[256],
  .param .align 4 .b8 kinds[128],
  .param .u32 groups
)
.maxntid 32, 1, 1
{
  .reg .pred %is_await, %is_other, %is_unset, %is_more;
  .reg .b32 %thread, %kind, %groups, %own, %await, %group, %value;
  .reg .b64 %at, %offset, %flag;
  mov.u32 %thread, %tid.x;
  mov.b64 %at, addresses;
  mul.wide.u32 %offset, %thread, 8;
  add.s64 %at, %at, %offset;
  ld.param.u64 %flag, [%at];
  mov.b64 %at, kinds;
  mul.wide.u32 %offset, %thread, 4;
  add.s64 %at, %at, %offset;
  ld.param.u32 %kind, [%at];
  ld.param.u32 %groups, [groups];
  shr.u32 %own, %kind, 1;
  and.b32 %await, %kind, 1;
  setp.ne.u32 %is_await, %await, 0;
  mov.u32 %group, 0;
turn:
  setp.ne.u32 %is_other, %own, %group;
  @%is_other bra next;
  @%is_await bra wait;
  fence.acq_rel.sys;
  st.relaxed.sys.global.u32 [%flag], 1;
  bra next;
wait:
  ld.acquire.sys.global.u32 %value, [%flag];
  setp.eq.u32 %is_unset, %value, 0;
  @%is_unset bra wait;
  st.relaxed.sys.global.u32 [%flag], 0;
next:
  bar.warp.sync 0xffffffff;
  add.u32 %group, %group, 1;
  setp.lt.u32 %is_more, %group, %groups;
  @%is_more bra turn;
  ret;
}
)";

constexpr unsigned kSumThreads = 512;
constexpr unsigned kSumBlocksPerMultiprocessor = 2;  // enough for the link, and half of the places

// Every block awaits the flags, so that none has to wait for another block; the first one signals. The last
// block that is through clears the flags: who that is, a counter tells, which goes back to zero by itself.
// All sums of a device share it, since they follow one another.
//
// Signals are threads of the first warp and awaits of the second, so that no thread that waits can keep one
// from signalling. The barrier hands on to all threads what those that waited have acquired.
constexpr char kSumCounter[] = R"(
.global .align 4 .u32 dynaflow_sums_through = 0;
)";
constexpr char kSumBegin[] = R"((
  .param .u64 total,
  .param .u64 bytes,
  .param .align 8 .b8 parts[128],
  .param .u32 num_parts,
  .param .align 8 .b8 signals[256],
  .param .u32 num_signals,
  .param .align 8 .b8 awaits[256],
  .param .u32 num_awaits
)
.maxntid 512, 1, 1
.minnctapersm 4
{
  .reg .pred %p;
  .reg .b32 %thread, %block, %blocks, %index, %n, %value, %bit, %w<4>, %v<4>;
  .reg .f32 %a<8>, %x;
  .reg .b64 %at, %flag, %place, %step, %bytes, %part;
  mov.u32 %thread, %tid.x;
  mov.u32 %block, %ctaid.x;
  mov.u32 %blocks, %nctaid.x;
  shr.u32 %n, %thread, 5;
  setp.eq.u32 %p, %n, 1;
  @%p bra wait;
  setp.ne.u32 %p, %block, 0;
  @%p bra ready;
  ld.param.u32 %n, [num_signals];
  setp.ge.u32 %p, %thread, %n;
  @%p bra ready;
  mov.b64 %at, signals;
  mul.wide.u32 %part, %thread, 8;
  add.s64 %at, %at, %part;
  ld.param.u64 %flag, [%at];
  fence.acq_rel.sys;
  st.relaxed.sys.global.u32 [%flag], 1;
  bra ready;
wait:
  sub.u32 %index, %thread, 32;
  ld.param.u32 %n, [num_awaits];
  setp.ge.u32 %p, %index, %n;
  @%p bra ready;
  mov.b64 %at, awaits;
  mul.wide.u32 %part, %index, 8;
  add.s64 %at, %at, %part;
  ld.param.u64 %flag, [%at];
spin:
  ld.acquire.sys.global.u32 %value, [%flag];
  setp.eq.u32 %p, %value, 0;
  @%p bra spin;
ready:
  bar.sync 0;
  mul.lo.u32 %value, %blocks, 512;
  mul.wide.u32 %step, %value, 16;
  mad.lo.u32 %value, %block, 512, %thread;
  mul.wide.u32 %place, %value, 16;
  ld.param.u64 %bytes, [bytes];
next:
  setp.ge.u64 %p, %place, %bytes;
  @%p bra through;
  mov.b64 %at, parts;
  ld.param.u64 %part, [%at];
  add.s64 %part, %part, %place;
  ld.global.v4.b32 {%w0, %w1, %w2, %w3}, [%part];
  ld.param.u64 %part, [%at + 8];
  add.s64 %part, %part, %place;
  ld.global.v4.b32 {%v0, %v1, %v2, %v3}, [%part];
)";
constexpr char kSumMore[] = R"(
  ld.param.u32 %n, [num_parts];
  sub.u32 %n, %n, 2;
  add.s64 %at, %at, 16;
more:
  setp.eq.u32 %p, %n, 0;
  @%p bra all;
  ld.param.u64 %part, [%at];
  add.s64 %part, %part, %place;
  ld.global.v4.b32 {%v0, %v1, %v2, %v3}, [%part];
)";
constexpr char kSumAll[] = R"(
  sub.u32 %n, %n, 1;
  add.s64 %at, %at, 8;
  bra more;
all:
)";
constexpr char kSumEnd[] = R"(
  ld.param.u64 %part, [total];
  add.s64 %part, %part, %place;
  st.global.v4.b32 [%part], {%w0, %w1, %w2, %w3};
  add.s64 %place, %place, %step;
  bra next;
through:
  ld.param.u32 %n, [num_awaits];
  setp.eq.u32 %p, %n, 0;
  @%p ret;
  setp.ne.u32 %p, %thread, 0;
  @%p ret;
  sub.u32 %value, %blocks, 1;
  mov.b64 %at, dynaflow_sums_through;
  atom.acq_rel.gpu.global.inc.u32 %index, [%at], %value;
  setp.ne.u32 %p, %index, %value;
  @%p ret;
  mov.b64 %at, awaits;
clear:
  ld.param.u64 %flag, [%at];
  st.relaxed.sys.global.u32 [%flag], 0;
  add.s64 %at, %at, 8;
  sub.u32 %n, %n, 1;
  setp.ne.u32 %p, %n, 0;
  @%p bra clear;
  ret;
}
)";

// What makes numbers of four words, and adds them to %a unless they are the first ones.
std::string Unpack(Element element, char words, bool first) {
  std::string text;
  const auto take = [&](int k, const std::string& bits) {
    text += StrCat("  mov.b32 %", first ? StrCat("a", k) : "x", ", ", bits, ";\n");
    if (!first) text += StrCat("  add.rn.f32 %a", k, ", %a", k, ", %x;\n");
  };
  for (int i = 0; i < 4; ++i) {
    const std::string word = StrCat("%", words, i);
    if (element == Element::kFloat32) {
      take(i, word);
    } else {
      text += StrCat("  shl.b32 %value, ", word, ", 16;\n");
      take(2 * i, "%value");
      text += StrCat("  and.b32 %value, ", word, ", 0xffff0000;\n");
      take(2 * i + 1, "%value");
    }
  }
  return text;
}

// What makes the words %w0 to %w3 of the sums. The conversion to bfloat16 came with later devices than the
// rest needs: to the nearest, of two the even one, and no number stays none.
std::string Pack(Element element) {
  std::string text;
  for (int i = 0; i < 4; ++i) {
    if (element == Element::kFloat32) {
      text += StrCat("  mov.b32 %w", i, ", %a", i, ";\n");
      continue;
    }
    for (int half = 0; half < 2; ++half) {
      const std::string sum = StrCat("%a", 2 * i + half), into = half ? "%value" : StrCat("%w", i);
      text += StrCat("  mov.b32 ", into, ", ", sum, ";\n");
      text += StrCat("  bfe.u32 %bit, ", into, ", 16, 1;\n  add.u32 ", into, ", ", into, ", %bit;\n");
      text += StrCat("  add.u32 ", into, ", ", into, ", 0x7fff;\n");
      text += StrCat("  setp.nan.f32 %p, ", sum, ", ", sum, ";\n  @%p mov.b32 ", into, ", 0x7fffffff;\n");
    }
    text += StrCat("  prmt.b32 %w", i, ", %w", i, ", %value, 0x7632;\n");
  }
  return text;
}

const char* NameOf(Element element) {
  return element == Element::kFloat32 ? "dynaflow_sum_float32" : "dynaflow_sum_bfloat16";
}

std::string Source() {
  std::string text = StrCat(kFlags, kSumCounter);
  for (Element element : {Element::kFloat32, Element::kBFloat16}) {
    text += StrCat(".visible .entry ", NameOf(element), kSumBegin, Unpack(element, 'w', /*first=*/true),
                   Unpack(element, 'v', /*first=*/false), kSumMore, Unpack(element, 'v', /*first=*/false),
                   kSumAll, Pack(element), kSumEnd);
  }
  return text;
}

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
  Module module = nullptr;
  DYNAFLOW_CUDA(driver, ModuleLoad, &module, Source().c_str());
  kernels->module_ = OwnedModule(module, {&driver});
  DYNAFLOW_CUDA(driver, ModuleGetFunction, &kernels->flags_, module, "dynaflow_flags");
  for (Element element : {Element::kFloat32, Element::kBFloat16}) {
    Function& sum = kernels->sums_[static_cast<size_t>(element)];
    DYNAFLOW_CUDA(driver, ModuleGetFunction, &sum, module, NameOf(element));
  }
  Device device = 0;
  int count = 0;
  DYNAFLOW_CUDA(driver, ContextGetDevice, &device);
  DYNAFLOW_CUDA(driver, DeviceGetAttribute, &count, kAttributeSmCount, device);
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
        num_parts(static_cast<uint32_t>(sum.reads.size())) {
    for (size_t i = 0; i < sum.reads.size(); ++i) parts[i] = sum.reads[i].offset;
    for (const Command& c : flags) {
      if (c.kind == CommandKind::kSignal) {
        signals[num_signals++] = c.writes[0].offset;
      } else {
        awaits[num_awaits++] = c.writes[0].offset;
      }
    }
  }

  // Blocks enough to have much of what is far away under way at once.
  unsigned Blocks(unsigned multiprocessors) const {
    const uint64_t wanted = (bytes / kSumBytes + kSumThreads - 1) / kSumThreads;
    const uint64_t most = uint64_t{kSumBlocksPerMultiprocessor} * std::max(multiprocessors, 1u);
    return static_cast<unsigned>(std::clamp<uint64_t>(wanted, 1, most));
  }

  uint64_t total, bytes;
  uint64_t parts[kMaxSummands] = {};
  uint32_t num_parts;
  uint64_t signals[kMaxFlags] = {};
  uint32_t num_signals = 0;
  uint64_t awaits[kMaxFlags] = {};
  uint32_t num_awaits = 0;
  void* pointers[8] = {&total, &bytes, parts, &num_parts, signals, &num_signals, awaits, &num_awaits};
};

Result<GraphNode> ExchangeKernels::AddSum(Graph graph, std::span<const GraphNode> after,
                                          std::span<const Command> flags, const Command& sum,
                                          int priority) const {
  SumParams params(flags, sum);
  DYNAFLOW_ASSIGN(const GraphNode node,
                  AddNode(graph, after, SumOf(sum.element), params.Blocks(multiprocessors_), kSumThreads,
                          params.pointers));
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
                            .block_x = kSumThreads,
                            .block_y = 1,
                            .block_z = 1,
                            .shared_bytes = 0,
                            .stream = stream,
                            .attributes = nullptr,
                            .num_attributes = 0};
  DYNAFLOW_CUDA(driver_, LaunchKernel, &config, SumOf(sum.element), params.pointers, nullptr);
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
