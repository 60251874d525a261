#include "xla_ffi/flag_kernel.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace dynaflow::cuda {
namespace {

// Thread i does its one flag when its group's turn comes: kinds[i] is twice the group, and one more for an
// await. Flags are shared with other devices, so all accesses are at the scope of the system. What a signal
// stands for was written by kernels and copies before this node, or read by them; the fence makes the flag
// come after it.
constexpr char kSource[] = R"(
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

}  // namespace

Result<std::shared_ptr<const FlagKernel>> FlagKernel::Of(const Driver& driver, Context context) {
  static std::mutex mutex;
  static auto& loaded = *new std::map<std::pair<const Driver*, Context>, std::weak_ptr<const FlagKernel>>;
  if (!driver.ModuleLoad || !driver.ModuleUnload || !driver.ModuleGetFunction || !driver.AddKernelNode) {
    return Unimplemented("the CUDA driver is too old for nodes with a kernel of our own");
  }
  std::lock_guard lock(mutex);
  std::weak_ptr<const FlagKernel>& entry = loaded[{&driver, context}];
  if (auto kernel = entry.lock()) return kernel;
  std::shared_ptr<FlagKernel> kernel(new FlagKernel(driver, context));
  Module module = nullptr;
  DYNAFLOW_CUDA(driver, ModuleLoad, &module, kSource);
  kernel->module_ = OwnedModule(module, {&driver});
  DYNAFLOW_CUDA(driver, ModuleGetFunction, &kernel->function_, module, "dynaflow_flags");
  entry = kernel;
  return std::shared_ptr<const FlagKernel>(std::move(kernel));
}

FlagKernel::~FlagKernel() {
  const ScopedContext scope(driver_, context_);  // whoever drops it may be about something else
  module_.reset();
}

Result<GraphNode> FlagKernel::AddNode(Graph graph, std::span<const GraphNode> after,
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
  const KernelNodeParams node{.function = function_,
                              .grid_x = 1,
                              .grid_y = 1,
                              .grid_z = 1,
                              .block_x = kMaxFlags,
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
