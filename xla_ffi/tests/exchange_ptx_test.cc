#include "xla_ffi/exchange_ptx.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dynaflow::cuda {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// What of a line stands between two texts; nothing if either is not there.
std::string_view Between(std::string_view line, std::string_view before, std::string_view after) {
  const auto at = line.find(before);
  if (at == line.npos) return {};
  line.remove_prefix(at + before.size());
  return line.substr(0, line.find(after));
}

// A kernel's labels, each as often as it stands there, and where its branches go.
struct Jumps {
  std::string name;
  std::multiset<std::string> labels;
  std::set<std::string> targets;
  int open = 0;  // braces
};

std::vector<Jumps> KernelsOf(const std::string& text) {
  std::vector<Jumps> kernels(1);  // what comes before the first
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (const auto name = Between(line, ".visible .entry ", "("); !name.empty()) {
      kernels.push_back({.name = std::string(name)});
    }
    Jumps& kernel = kernels.back();
    if (line.ends_with(':')) kernel.labels.insert(line.substr(0, line.size() - 1));
    if (const auto target = Between(line, "bra ", ";"); !target.empty()) kernel.targets.emplace(target);
    kernel.open += static_cast<int>(std::count(line.begin(), line.end(), '{') -
                                    std::count(line.begin(), line.end(), '}'));
  }
  return kernels;
}

// What can be found out without the driver: it says no more than that the text is wrong, on a machine with a
// GPU.
TEST(ExchangePtx, BranchesGoToOneLabelOfTheirKernel) {
  for (int major : {7, 8, 9}) {
    const auto kernels = KernelsOf(ExchangePtx(major));
    EXPECT_EQ(kernels.size(), 1 + 5);
    EXPECT_THAT(kernels[0].labels, IsEmpty());
    for (const auto& kernel : kernels) {
      for (const auto& label : kernel.labels) {
        EXPECT_EQ(kernel.labels.count(label), 1)
            << kernel.name << " has label " << label << " more than once";
      }
      for (const auto& target : kernel.targets) {
        EXPECT_EQ(kernel.labels.count(target), 1) << kernel.name << " goes to " << target;
      }
      EXPECT_EQ(kernel.open, 0) << kernel.name;
    }
  }
}

TEST(ExchangePtx, ConvertsOnlyWhereTheDeviceCan) {
  EXPECT_THAT(ExchangePtx(7), Not(HasSubstr("cvt.rn.bf16x2")));
  EXPECT_THAT(ExchangePtx(7), HasSubstr(".target sm_70"));
  EXPECT_THAT(ExchangePtx(9), HasSubstr("cvt.rn.bf16x2"));
  EXPECT_THAT(ExchangePtx(9), HasSubstr(".target sm_80"));
}

TEST(ExchangePtx, HasTheKernelsByTheirNames) {
  for (Element element : {Element::kFloat32, Element::kBFloat16}) {
    for (bool with_norm : {false, true}) {
      EXPECT_THAT(ExchangePtx(9), HasSubstr(StrCat(".entry ", SumKernel(element, with_norm), "(")));
    }
  }
  EXPECT_THAT(ExchangePtx(9), HasSubstr(StrCat(".entry ", kFlagsKernel, "(")));
}

}  // namespace
}  // namespace dynaflow::cuda
