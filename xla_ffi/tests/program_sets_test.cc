#include "xla_ffi/program_sets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "xla_ffi/host_device.h"
#include "xla_ffi/tests/programs.h"

namespace dynaflow {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// A program that fits calls with this address only.
std::shared_ptr<Executor> At(uint64_t address) {
  Program program = ProgramBuilder(0).PinnedInput(address, 4);
  auto device = HostDevice::Create(program, {});
  return std::make_shared<Executor>(std::move(program), std::move(*device));
}

// Calls of devices 0, 1, ... with these addresses.
class Calls {
 public:
  Calls(std::initializer_list<uint64_t> addresses) : calls_(addresses.size()) {
    for (uint64_t a : addresses) inputs_.push_back(reinterpret_cast<void*>(a));
    for (size_t i = 0; i < calls_.size(); ++i) {
      calls_[i].device = static_cast<int>(i);
      calls_[i].inputs = std::span<void* const>(inputs_).subspan(i, 1);
    }
  }
  operator std::span<const Call>() const { return calls_; }  // NOLINT

 private:
  std::vector<void*> inputs_;
  std::vector<Call> calls_;
};

TEST(ProgramSets, NeverMixesSets) {
  ProgramSets sets(2, 4);
  const auto old0 = At(0x10), old1 = At(0x20), new0 = At(0x10), new1 = At(0x30);
  EXPECT_THAT(sets.Add(0, old0), IsEmpty());
  EXPECT_THAT(sets.Add(1, old1), IsEmpty());
  EXPECT_THAT(sets.Add(1, new1), IsEmpty());
  EXPECT_THAT(sets.Add(0, new0), IsEmpty());
  // Device 0 fits both; what device 1 brings decides.
  EXPECT_THAT(sets.FindAll(Calls{0x10, 0x30}), ElementsAre(new0, new1));
  EXPECT_THAT(sets.FindAll(Calls{0x10, 0x20}), ElementsAre(old0, old1));
  EXPECT_THAT(sets.FindAll(Calls{0x10, 0x30}), ElementsAre(new0, new1));
}

TEST(ProgramSets, HasNoUseForHalfASet) {
  ProgramSets sets(2, 4);
  EXPECT_THAT(sets.Add(0, At(0x10)), IsEmpty());
  EXPECT_THAT(sets.FindAll(Calls{0x10, 0x20}), IsEmpty());
  EXPECT_EQ(sets.Misfit(Calls{0x10, 0x20}), 1);
  EXPECT_THAT(sets.DropIncomplete(), SizeIs(1));
  EXPECT_THAT(sets.Add(1, At(0x20)), IsEmpty());
  EXPECT_THAT(sets.FindAll(Calls{0x10, 0x20}), IsEmpty()) << "the halves are of different sets";
}

TEST(ProgramSets, ForgetsWholeSets) {
  ProgramSets sets(2, 1);
  EXPECT_THAT(sets.Add(0, At(0x10)), IsEmpty());
  EXPECT_THAT(sets.Add(1, At(0x20)), IsEmpty());
  EXPECT_THAT(sets.Add(1, At(0x40)), ElementsAre(SizeIs(2)));
  EXPECT_THAT(sets.Add(0, At(0x30)), IsEmpty());
  EXPECT_THAT(sets.FindAll(Calls{0x30, 0x40}), SizeIs(2));
}

TEST(ProgramSets, SaysWhichDeviceHasNoProgram) {
  ProgramSets sets(2, 4);
  (void)sets.Add(0, At(0x10));
  (void)sets.Add(1, At(0x20));
  EXPECT_EQ(sets.Misfit(Calls{0x10, 0x99}), 1);
  EXPECT_EQ(sets.Misfit(Calls{0x99, 0x20}), 0);
}

TEST(ProgramSets, OfOneParticipantAreProgramsPerDevice) {
  ProgramSets sets(1, 2);
  for (uint64_t a : {0x10, 0x20}) {
    EXPECT_THAT(sets.Add(0, At(a)), IsEmpty());
    EXPECT_THAT(sets.Add(1, At(a)), IsEmpty());
  }
  EXPECT_THAT(sets.sets(), SizeIs(4));
  EXPECT_THAT(sets.Add(0, At(0x30)), SizeIs(1));
  const Calls first{0x10}, second{0x20};
  EXPECT_EQ(sets.Find(std::span<const Call>(first)[0]), nullptr) << "the oldest of device 0 is gone";
  EXPECT_NE(sets.Find(std::span<const Call>(second)[0]), nullptr);
}

}  // namespace
}  // namespace dynaflow
