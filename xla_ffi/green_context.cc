#include "xla_ffi/green_context.h"

#include <algorithm>
#include <numeric>

namespace dynaflow::cuda {

Result<std::vector<OwnedGreenContext>> ShareOutSms(const Driver& driver, Device device,
                                                   const std::vector<unsigned>& budgets) {
  std::vector<OwnedGreenContext> contexts(budgets.size());
  if (budgets.empty()) return contexts;
  if (!driver.has_green_contexts()) return Unimplemented("sm_budget needs a CUDA driver of 12.4 or later");
  // What one split gives cannot be split again, but may be put together: so cut the device once, into the
  // smallest pieces, and hand those out.
  Resource all{}, rest{};
  unsigned num_pieces = 0;
  DYNAFLOW_CUDA(driver, DeviceGetResource, device, &all, kResourceSm);
  DYNAFLOW_CUDA(driver, SplitSms, nullptr, &num_pieces, &all, &rest, 0, 1);
  std::vector<Resource> pieces(num_pieces);
  DYNAFLOW_CUDA(driver, SplitSms, pieces.data(), &num_pieces, &all, &rest, 0, 1);
  pieces.resize(num_pieces);
  const unsigned unit = pieces.empty() ? 1 : pieces[0].sm_count;
  if (rest.sm_count) pieces.insert(pieces.begin(), rest);  // taken last

  // Smallest budget first: the largest can best do with a little less.
  std::vector<size_t> order(budgets.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return budgets[a] < budgets[b]; });
  for (size_t i : order) {
    std::vector<Resource> share;
    unsigned count = 0;
    while (count < budgets[i] && !pieces.empty()) {
      count += pieces.back().sm_count;
      share.push_back(pieces.back());
      pieces.pop_back();
    }
    if (share.empty() || count + unit <= budgets[i]) {
      return InvalidArgument("the streams' sm_budgets ask for more than the device's ", all.sm_count, " SMs");
    }
    ResourceDesc desc = nullptr;
    GreenContext context = nullptr;
    DYNAFLOW_CUDA(driver, DescribeResources, &desc, share.data(), static_cast<unsigned>(share.size()));
    DYNAFLOW_CUDA(driver, GreenContextCreate, &context, desc, device, kGreenDefaultStream);
    contexts[i] = OwnedGreenContext(context, {&driver});
  }
  return contexts;
}

}  // namespace dynaflow::cuda
