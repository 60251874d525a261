#include "xla_ffi/peers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/host_device.h"
#include "xla_ffi/host_flags.h"
#include "xla_ffi/registry.h"
#include "xla_ffi/tests/programs.h"

namespace dynaflow {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// What two processes share: their notices, flags that each awaits, and what each sends the other.
struct Shared {
  std::array<Notice, 2> notices;
  std::array<std::array<uint32_t, 4>, 2> flags;
  std::array<std::array<uint64_t, 16>, 2> arrived;
};

class PeersTest : public testing::Test {
 protected:
  PeersTest()
      : shared_(static_cast<Shared*>(
            mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~PeersTest() override {
    if (child_) waitpid(child_, nullptr, 0);
    if (pidfd_ >= 0) close(pidfd_);
    munmap(shared_, sizeof(Shared));
  }

  // The other process. It must not be started from a process with threads, which it would not have.
  void Start(const std::function<bool()>& run) {
    child_ = fork();
    if (child_ == 0) _exit(run() ? 0 : 1);
    pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, child_, 0));
    ASSERT_GE(pidfd_, 0);
  }
  // What it came to.
  bool Join() {
    int status = 0;
    waitpid(child_, &status, 0);
    child_ = 0;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

  std::shared_ptr<Peers> Other(double timeout = 60) {
    return std::make_shared<Peers>(&shared_->notices[0],
                                   std::vector<Peers::Process>{{"process 1", pidfd_, &shared_->notices[1]}},
                                   timeout);
  }

  Shared* const shared_;
  pid_t child_ = 0;
  int pidfd_ = -1;
};

constexpr auto kLong = 60s;
const auto kNever = [] { return false; };
auto Now() { return std::chrono::steady_clock::now(); }

TEST_F(PeersTest, FlagsReachFromProcessToProcess) {
  constexpr int kTimes = 200;
  Start([&] {
    for (int i = 0; i < kTimes; ++i) {
      if (!TakeFlag(&shared_->flags[1][0], kNever, Now() + kLong, true)) return false;
      if (shared_->arrived[1][0] != uint64_t(i)) return false;
      shared_->arrived[0][0] = 2 * i;
      SetFlag(&shared_->flags[0][0]);
    }
    return true;
  });
  for (int i = 0; i < kTimes; ++i) {
    shared_->arrived[1][0] = i;
    SetFlag(&shared_->flags[1][0]);
    ASSERT_TRUE(TakeFlag(&shared_->flags[0][0], kNever, Now() + kLong, true));
    ASSERT_EQ(shared_->arrived[0][0], uint64_t(2 * i));
  }
  EXPECT_TRUE(Join());
}

TEST_F(PeersTest, WaitingForAnotherProcessHasAnEnd) {
  EXPECT_FALSE(TakeFlag(&shared_->flags[0][0], kNever, Now() + 5ms, true));
  int looks = 0;
  EXPECT_FALSE(TakeFlag(&shared_->flags[0][0], [&] { return ++looks == 3; }, Now() + kLong, true));
  SetFlag(&shared_->flags[0][0]);
  EXPECT_TRUE(TakeFlag(
      &shared_->flags[0][0], [] { return true; }, Now() + kLong, true))
      << "what was set is taken, whatever has happened since";
}

TEST_F(PeersTest, AProcessThatHasEndedIsMissed) {
  Start([&] { return TakeFlag(&shared_->flags[1][0], kNever, Now() + kLong, true); });
  const auto peers = Other();
  EXPECT_TRUE(peers->Check().ok());
  SetFlag(&shared_->flags[1][0]);
  while (peers->Check().ok()) std::this_thread::yield();
  EXPECT_EQ(peers->Check().message(), "process 1 has ended");
  EXPECT_TRUE(Join());
  EXPECT_EQ(peers->Check(0).message(), "process 1 has ended") << "also when it has been waited for";
}

TEST_F(PeersTest, AProcessSaysWhyItFailed) {
  Start([&] {
    const Peers own(&shared_->notices[1], {}, 60);
    own.Fail(Internal("out of luck"));
    own.Fail(Internal(std::string(5000, 'x')));
    return true;
  });
  EXPECT_TRUE(Join());
  EXPECT_EQ(Other()->Check().message(), "process 1: out of luck")
      << "the first failure, although it has ended";
}

TEST_F(PeersTest, LongReasonsAreCut) {
  const Peers own(&shared_->notices[1], {}, 60);
  own.Fail(Internal(std::string(5000, 'x')));
  Start([] { return true; });
  EXPECT_EQ(Other()->Check().message(), "process 1: " + std::string(1019, 'x'));
}

TEST_F(PeersTest, ReasonsAreCutBetweenCharacters) {
  for (const std::string character : {"\xc3\xa9", "\xe6\xbc\x94", "\xf0\x9f\x98\x80"}) {
    for (size_t before = 1010; before <= 1019; ++before) {
      Notice notice{};
      std::string text(before, 'x');
      while (text.size() < 2000) text += character;
      Peers(&notice, {}, 60).Fail(Internal(text));
      const size_t whole = (1019 - before) / character.size();
      EXPECT_EQ(notice.why, text.substr(0, before + whole * character.size()));
    }
  }
}

// One device's part of a plan of two, one in each process: each sends the other a number, and adds.
class Half {
 public:
  Half(Shared* shared, int me) : shared_(shared), me_(me) {}

  std::shared_ptr<Plan> MakePlan(std::shared_ptr<Peers> peers, double timeout = 60,
                                 const std::function<Status()>& before = nullptr) {
    auto plan = std::make_shared<Plan>(
        [this, before](std::span<const Call> calls) {
          if (before) DYNAFLOW_RETURN_IF_ERROR(before());
          Add(calls[0].device);
          return Status();
        },
        1, 1, timeout, /*across=*/true);
    plan->SetPeers(std::move(peers));
    plan_ = plan.get();
    return plan;
  }

  std::string Run(uint64_t value, uint64_t* sum) {
    void *inputs[] = {&value}, *outputs[] = {sum};
    return plan_->Run({.device = me_, .inputs = inputs, .outputs = outputs}).message();
  }

 private:
  void Add(int device) {
    const int other = 1 - me_;
    const auto flag = [&](int whose, int which) { return &shared_->flags[whose][which]; };
    uint64_t* const arrived = shared_->arrived[me_].data();
    const Program program =
        ProgramBuilder(1)
            .Devices(2)
            .MovingInput(8)
            .Output(8)
            .Copy(0, "input", Memory(&own_, 8), InputBytes(0, 0, 8))
            .Signal(0, "start", flag(other, 0), 1)
            .Await(0, "start", flag(me_, 0), 1)
            .Copy(0, "send", Memory(shared_->arrived[other].data(), 8), Memory(&own_, 8), 1)
            .Signal(0, "send", flag(other, 1), 1)
            .Await(0, "send", flag(me_, 1), 1, {Memory(arrived, 8)})
            .Launch(0, "sum", {Memory(&own_, 8), Memory(arrived, 8)}, {Memory(&sum_, 8)})
            .Copy(0, "output", OutputBytes(0, 0, 8), Memory(&sum_, 8));
    auto on = HostDevice::Create(program, {[this, arrived] {
                                   sum_ = own_ + *arrived;
                                   return Status();
                                 }},
                                 false, {HostDevice::kOwnProcess, 0});
    plan_->Add(device, std::make_shared<Executor>(program, std::move(*on)));
  }

  Shared* const shared_;
  const int me_;
  Plan* plan_ = nullptr;
  uint64_t own_ = 0, sum_ = 0;
};

TEST_F(PeersTest, APlanRunsAcrossProcesses) {
  constexpr uint64_t kTimes = 50;
  const pid_t parent = getpid();
  Start([&] {
    const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, parent, 0));
    Half half(shared_, 1);
    const auto plan = half.MakePlan(std::make_shared<Peers>(
        &shared_->notices[1], std::vector<Peers::Process>{{"process 0", pidfd, &shared_->notices[0]}}, 60));
    uint64_t sum = 0;
    for (uint64_t i = 0; i < kTimes; ++i) {
      if (!half.Run(100 * i, &sum).empty() || sum != 101 * i) return false;
    }
    return true;
  });
  Half half(shared_, 0);
  const auto plan = half.MakePlan(Other());
  uint64_t sum = 0;
  for (uint64_t i = 0; i < kTimes; ++i) {
    ASSERT_EQ(half.Run(i, &sum), "");
    ASSERT_EQ(sum, 101 * i);
  }
  EXPECT_TRUE(Join());
  EXPECT_EQ(half.Run(1, &sum), "process 1 has ended");
  EXPECT_EQ(plan->stats().broken, "process 1 has ended");
}

TEST_F(PeersTest, ARunFailsWithTheProcessThatItWaitsFor) {
  Start([&] { return TakeFlag(&shared_->flags[1][0], kNever, Now() + kLong, true); });  // it starts, and ends
  Half half(shared_, 0);
  const auto plan = half.MakePlan(Other());
  uint64_t sum = 0;
  EXPECT_EQ(half.Run(1, &sum), "device 0: operator 'start' (command 2): process 1 has ended");
  EXPECT_TRUE(shared_->notices[0].failed) << "others are told";
  EXPECT_THAT(half.Run(1, &sum), HasSubstr("process 1 has ended"));
}

TEST_F(PeersTest, AProcessThatDoesNotComeIsWaitedForSoLong) {
  Start([&] { return TakeFlag(&shared_->flags[1][3], kNever, Now() + kLong, true); });
  Half half(shared_, 0);
  const auto plan = half.MakePlan(Other(/*timeout=*/0.02));
  uint64_t sum = 0;
  EXPECT_THAT(half.Run(1, &sum), HasSubstr("process 1 is alive, but did not answer within 0.02 s"));
  SetFlag(&shared_->flags[1][3]);
  EXPECT_TRUE(Join());
}

TEST_F(PeersTest, WhatPreventsARunIsToldToTheOthers) {
  Start([&] { return TakeFlag(&shared_->flags[1][3], kNever, Now() + kLong, true); });
  Half half(shared_, 0);
  const auto plan = half.MakePlan(Other(), 60, [] { return Internal("no memory"); });
  uint64_t sum = 0;
  EXPECT_EQ(half.Run(1, &sum), "no memory");
  EXPECT_TRUE(shared_->notices[0].failed);
  EXPECT_STREQ(shared_->notices[0].why, "no memory");
  EXPECT_EQ(plan->stats().broken, "no memory") << "the others have launched their part of the run";
  SetFlag(&shared_->flags[1][3]);
  EXPECT_TRUE(Join());
}

}  // namespace
}  // namespace dynaflow
