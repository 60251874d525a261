#include "xla_ffi/exchange_ptx.h"

#include <algorithm>
#include <map>
#include <regex>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dynaflow::cuda {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// What can be found out without the driver: it says no more than that the text is wrong, on a machine with a
// GPU.
TEST(ExchangePtx, BranchesGoToOneLabelOfTheirKernel) {
  for (int major : {7, 8, 9}) {
    const std::string text = ExchangePtx(major);
    const std::regex entry(R"(\.visible \.entry (\w+))"), branch(R"(bra (\w+);)"), label(R"(\n(\w+):)");
    int kernels = 0;
    for (std::sregex_iterator at(text.begin(), text.end(), entry), end; at != end; ++kernels) {
      const std::string name = (*at)[1];
      const auto begin = at->position();
      const auto stop = ++at == end ? static_cast<std::ptrdiff_t>(text.size()) : at->position();
      const std::string kernel = text.substr(begin, stop - begin);
      std::map<std::string, int> labels;
      for (std::sregex_iterator found(kernel.begin(), kernel.end(), label); found != end; ++found) {
        EXPECT_EQ(++labels[(*found)[1]], 1) << name << " has two labels " << (*found)[1];
      }
      for (std::sregex_iterator found(kernel.begin(), kernel.end(), branch); found != end; ++found) {
        EXPECT_EQ(labels[(*found)[1]], 1) << name << " goes to " << (*found)[1];
      }
      EXPECT_EQ(std::count(kernel.begin(), kernel.end(), '{'), std::count(kernel.begin(), kernel.end(), '}'));
    }
    EXPECT_EQ(kernels, 5);
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
