#include "xla_ffi/host_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <latch>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "xla_ffi/executor.h"
#include "xla_ffi/tests/programs.h"
#include "xla_ffi/tests/thread_limit.h"

namespace dynaflow {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::HasSubstr;

Status Nothing() { return {}; }

std::shared_ptr<Executor> OnHost(Program program, std::vector<HostPartition> partitions, bool timed = false) {
  auto device = HostDevice::Create(program, std::move(partitions), timed);
  EXPECT_TRUE(device.ok()) << device.status().message();
  return std::make_shared<Executor>(std::move(program), std::move(*device));
}

// y = (x + 1) + (x * 2), the two terms on two streams: input 0 -> pool -> output 0. The pool is shared, so
// runs that were not kept apart would give wrong sums.
class TwoBranches {
 public:
  TwoBranches() {
    constexpr uint64_t kBytes = sizeof(Row);
    executor_ = OnHost(
        ProgramBuilder(2)
            .MovingInput(kBytes)
            .Output(kBytes)
            .Copy(0, "input", Memory(&x_, kBytes), InputBytes(0, 0, kBytes))
            .Record(0, 0)
            .Launch(0, "left", {Memory(&x_, kBytes)}, {Memory(&left_, kBytes)})
            .Wait(1, 0)
            .Launch(1, "right", {Memory(&x_, kBytes)}, {Memory(&right_, kBytes)})
            .Record(1, 1)
            .Wait(0, 1)
            .Launch(0, "join", {Memory(&left_, kBytes), Memory(&right_, kBytes)}, {Memory(&y_, kBytes)})
            .Copy(0, "output", OutputBytes(0, 0, kBytes), Memory(&y_, kBytes)),
        {[this] {
           for (size_t i = 0; i < x_.size(); ++i) left_[i] = x_[i] + 1;
           return Status();
         },
         [this] {
           for (size_t i = 0; i < x_.size(); ++i) right_[i] = x_[i] * 2;
           return Status();
         },
         [this] {
           for (size_t i = 0; i < x_.size(); ++i) y_[i] = left_[i] + right_[i];
           return Status();
         }});
  }

  bool RunAndCheck(int start) {
    Row x, y{};
    std::iota(x.begin(), x.end(), start);
    void* in[] = {x.data()};
    void* out[] = {y.data()};
    if (!executor_->Run({.inputs = in, .outputs = out}).ok()) return false;
    for (size_t i = 0; i < x.size(); ++i) {
      if (y[i] != 3 * x[i] + 1) return false;
    }
    return true;
  }

 private:
  using Row = std::array<int, 64>;
  Row x_, left_, right_, y_;
  std::shared_ptr<Executor> executor_;
};

TEST(HostDevice, CopiesRows) {
  const uint32_t from[] = {1, 2, 3, 4, 5, 6};
  uint32_t to[8] = {};
  const Program p = ProgramBuilder(1).CopyRows(0, "rows", Memory(to, 28), Memory(from, 20), {3, 8, 12});
  auto device = HostDevice::Create(p, {});
  ASSERT_TRUE(device.ok());
  ASSERT_TRUE((*device)->Run(p, {}).ok());
  EXPECT_THAT(to, ElementsAre(1, 0, 0, 3, 0, 0, 5, 0));
}

// Adds numbers, each repeated over the length of a sum.
template <typename T>
T SumOnHost(std::vector<T> numbers, Element element) {
  using Part = std::array<T, kSumBytes / sizeof(T)>;
  struct alignas(kSumBytes) Aligned {
    Part part;
  };
  std::vector<Aligned> parts(numbers.size() + 1);
  std::vector<Range> reads;
  for (size_t i = 0; i < numbers.size(); ++i) {
    parts[i].part.fill(numbers[i]);
    reads.push_back(Memory(&parts[i], kSumBytes));
  }
  Part& total = parts.back().part;
  const Program p = ProgramBuilder(1).Sum(0, "sum", Memory(&total, kSumBytes), std::move(reads), element);
  EXPECT_TRUE(Validate(p).ok()) << Validate(p).message();
  EXPECT_TRUE(OnHost(p, {})->Run({}).ok());
  EXPECT_EQ(std::count(total.begin(), total.end(), total[0]), std::ssize(total)) << "the same numbers, added";
  return total[0];
}

TEST(HostDevice, AddsFloat32InOrder) {
  const auto sum = [](std::vector<float> numbers) {
    return SumOnHost(std::move(numbers), Element::kFloat32);
  };
  EXPECT_EQ(sum({1.5f, -4}), -2.5f);
  EXPECT_EQ(sum({1e8f, -1e8f, 1}), 1.0f);
  EXPECT_EQ(sum({1e8f, 1, -1e8f}), 0.0f);
  EXPECT_EQ(sum(std::vector<float>(kMaxSummands, 0.5f)), 8.0f);
}

TEST(HostDevice, AddsBFloat16InFloat32AndRoundsOnce) {
  const auto sum = [](std::vector<uint16_t> numbers) {
    return SumOnHost(std::move(numbers), Element::kBFloat16);
  };
  constexpr uint16_t kOne = 0x3f80, kAfterOne = 0x3f81;
  constexpr uint16_t kHalfway = 0x3b80;  // from the one to the other
  EXPECT_EQ(sum({kOne, kOne}), 0x4000);
  EXPECT_EQ(sum({kOne, kHalfway}), kOne) << "of two that are equally near, the even one";
  EXPECT_EQ(sum({kAfterOne, kHalfway}), 0x3f82);
  EXPECT_EQ(sum({0xbf81, 0xbb80}), 0xbf82);
  EXPECT_EQ(sum({kOne, kHalfway, 0x3400}), kAfterOne) << "just above the middle";
  EXPECT_EQ(sum({kOne, kHalfway, kHalfway}), kAfterOne) << "rounded twice it would be one";
  constexpr uint16_t kMost = 0x7f7f, kInfinity = 0x7f80, kNaN = 0x7fff;
  EXPECT_EQ(sum({kMost, 0x7b00}), kInfinity) << "the middle between the largest number and the next";
  EXPECT_EQ(sum({kMost, 0x7a80}), kMost);
  EXPECT_EQ(sum({kMost, kMost, 0xff7f}), kInfinity);
  EXPECT_EQ(sum({kInfinity, kOne}), kInfinity);
  EXPECT_EQ(sum({kInfinity, 0xff80}), kNaN);
  EXPECT_EQ(sum({kOne, 0x7f81}), kNaN) << "whatever the NaN";
  EXPECT_EQ(sum({0xffff, kOne}), kNaN);
}

TEST(HostDevice, ASumMayTakeThePlaceOfASummand) {
  alignas(kSumBytes) std::array<float, 8> a, b;
  a.fill(2);
  std::iota(b.begin(), b.end(), 0.0f);
  const auto program = OnHost(
      ProgramBuilder(1).Sum(0, "sum", Memory(&b, sizeof b), {Memory(&a, sizeof a), Memory(&b, sizeof b)}),
      {});
  ASSERT_TRUE(program->Run({}).ok());
  EXPECT_THAT(b, ElementsAre(2, 3, 4, 5, 6, 7, 8, 9));
}

TEST(HostDevice, NormalizesTheRowsOfASum) {
  using Numbers = std::array<float, 8>;  // two rows of four
  struct alignas(kSumBytes) {
    Numbers a{1, 2, 3, 4, 0, 0, 0, 0}, b{1, 0, -1, -2, 0, 1, 0, 1}, residual{0, 0, 0, 0, 1, 1, 1, 0};
    std::array<float, 4> weight{1, 2, 3, 4};
    Numbers total, normed;
  } m;
  const auto run = [&](std::vector<Range> more, Norm norm) {
    std::vector<Range> reads = {Memory(&m.a, 32), Memory(&m.b, 32)};
    reads.insert(reads.end(), more.begin(), more.end());
    const Program p =
        ProgramBuilder(1).SumAndNorm(0, "norm", Memory(&m.total, 32), Memory(&m.normed, 32), reads, norm);
    ASSERT_TRUE(Validate(p).ok()) << Validate(p).message();
    ASSERT_TRUE(OnHost(p, {})->Run({}).ok());
  };
  run({}, {.width = 4});
  EXPECT_THAT(m.total, ElementsAre(2, 2, 2, 2, 0, 1, 0, 1));
  const float root = std::sqrt(2.0f);
  EXPECT_THAT(m.normed, ElementsAre(1, 1, 1, 1, 0, FloatEq(root), 0, FloatEq(root)));
  run({Memory(&m.residual, 32), Memory(&m.weight, 16)},
      {.width = 4, .epsilon = 2.5f, .residual = true, .weight = Element::kFloat32});
  EXPECT_THAT(m.total, ElementsAre(2, 2, 2, 2, 1, 2, 1, 1));
  const float scale = 1 / std::sqrt(6.5f), other = 1 / std::sqrt(4.25f);
  EXPECT_THAT(m.normed,
              ElementsAre(FloatEq(2 * scale), FloatEq(4 * scale), FloatEq(6 * scale), FloatEq(8 * scale),
                          FloatEq(other), FloatEq(4 * other), FloatEq(3 * other), FloatEq(4 * other)));
}

TEST(HostDevice, ANormRoundsWhereItSays) {
  using Row = std::array<uint16_t, 8>;
  struct alignas(kSumBytes) {
    Row a, b{}, weight, total, normed;
  } m;
  m.a.fill(0x4040);       // 3
  m.weight.fill(0x3fe0);  // 1.75
  const auto run = [&](bool rounds_scale, bool rounds_normed) {
    const Norm norm{.width = 8,
                    .epsilon = -0.0805f,  // so that the scale is 0.33483
                    .weight = Element::kBFloat16,
                    .rounds_scale = rounds_scale,
                    .rounds_normed = rounds_normed};
    const Program p = ProgramBuilder(1).SumAndNorm(
        0, "norm", Memory(&m.total, 16), Memory(&m.normed, 16),
        {Memory(&m.a, 16), Memory(&m.b, 16), Memory(&m.weight, 16)}, norm, Element::kBFloat16);
    EXPECT_TRUE(OnHost(p, {})->Run({}).ok());
    return m.normed[3];
  };
  EXPECT_EQ(run(false, false), 0x3fe1) << "1.0045 * 1.75";
  EXPECT_EQ(run(true, false), 0x3fe0) << "3 * 0.333984375 * 1.75";
  EXPECT_EQ(run(false, true), 0x3fe2) << "1.0078125 * 1.75";
  EXPECT_EQ(run(true, true), 0x3fe0) << "1 * 1.75";
}

TEST(HostDevice, TakesTheTimeOfASum) {
  alignas(kSumBytes) std::array<float, 4> a{}, b{};
  const auto program = OnHost(
      ProgramBuilder(1).Sum(0, "sum", Memory(&b, 16), {Memory(&a, 16), Memory(&b, 16)}), {}, /*timed=*/true);
  ASSERT_TRUE(program->Run({}).ok());
  const auto times = program->Times();
  ASSERT_TRUE(times.ok()) << times.status().message();
  ASSERT_EQ(times.value().size(), 1u);
  EXPECT_LE(times.value()[0].begin_us, times.value()[0].end_us);
}

TEST(HostDevice, RunsAProgram) {
  TwoBranches program;
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(program.RunAndCheck(i));
}

TEST(HostDevice, SharesAProgramBetweenThreads) {
  TwoBranches program;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) wrong += !program.RunAndCheck(1000 * t + i);
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
}

TEST(HostDevice, RunsTwoProgramsAtOnce) {
  // Each program's partition waits for the other's: this returns only if they overlap.
  std::latch both(2);
  auto meet = [&] {
    both.arrive_and_wait();
    return Status();
  };
  auto a = OnHost(ProgramBuilder(1).Launch(0, "a"), {meet});
  auto b = OnHost(ProgramBuilder(1).Launch(0, "b"), {meet});
  std::thread other([&] { EXPECT_TRUE(a->Run({}).ok()); });
  EXPECT_TRUE(b->Run({}).ok());
  other.join();
}

TEST(HostDevice, RunsStreamsAtOnce) {
  std::latch both(2);
  auto meet = [&] {
    both.arrive_and_wait();
    return Status();
  };
  EXPECT_TRUE(OnHost(ProgramBuilder(2).Launch(0, "a").Launch(1, "b"), {meet, meet})->Run({}).ok());
}

TEST(HostDevice, KeepsTheOrderOfEvents) {
  std::atomic<int> step = 0;
  auto expect = [&](int want) {
    return [&step, want] { return step++ == want ? Status() : Internal("out of order"); };
  };
  const auto program = OnHost(ProgramBuilder(3)
                                  .Launch(2, "first")
                                  .Record(2, 0)
                                  .Wait(0, 0)
                                  .Launch(0, "second")
                                  .Record(0, 1)
                                  .Wait(1, 1)
                                  .Launch(1, "third"),
                              {expect(0), expect(1), expect(2)});
  for (int i = 0; i < 100; ++i) {
    step = 0;
    const Status status = program->Run({});
    ASSERT_TRUE(status.ok()) << status.message();
  }
}

TEST(HostDevice, AFailureNamesTheOperatorAndWakesTheWaiters) {
  std::atomic<bool> ran_after = false;
  const auto program =
      OnHost(ProgramBuilder(2).Launch(0, "fails").Record(0, 0).Wait(1, 0).Launch(1, "depends"),
             {[] { return Internal("out of luck"); },
              [&] {
                ran_after = true;
                return Status();
              }});
  for (int i = 0; i < 50; ++i) {
    const Status status = program->Run({});
    EXPECT_EQ(status.message(), "operator 'fails' (command 0): out of luck");
  }
  EXPECT_FALSE(ran_after);
}

TEST(HostDevice, AnExceptionIsAFailure) {
  EXPECT_THAT(OnHost(ProgramBuilder(1).Launch(0, "throws"),
                     {[]() -> Status { throw std::runtime_error("as programmed"); }})
                  ->Run({})
                  .message(),
              HasSubstr("operator 'throws' (command 0): as programmed"));
  EXPECT_THAT(OnHost(ProgramBuilder(1).Launch(0, "throws"), {[]() -> Status { throw 7; }})->Run({}).message(),
              HasSubstr("operator 'throws'"));
}

TEST(HostDevice, RecoversAfterAFailure) {
  bool fail = true;
  const auto program = OnHost(ProgramBuilder(2).Launch(0, "moody").Record(0, 0).Wait(1, 0).Launch(1, "next"),
                              {[&] { return fail ? Internal("not now") : Status(); }, Nothing});
  EXPECT_FALSE(program->Run({}).ok());
  fail = false;
  EXPECT_TRUE(program->Run({}).ok());
}

TEST(HostDevice, TakesAProgramWithoutStreams) { EXPECT_TRUE(OnHost(ProgramBuilder(0), {})->Run({}).ok()); }

TEST(HostDevice, WantsAFunctionForEachPartition) {
  const Program program = ProgramBuilder(1).Launch(0, "a");
  EXPECT_THAT(HostDevice::Create(program, {}).status().message(),
              HasSubstr("has 1 partitions, but 0 functions"));
  EXPECT_THAT(HostDevice::Create(program, {nullptr}).status().message(),
              HasSubstr("partition 0 is no function"));
}

TEST(HostDevice, AwaitsOnlyProcessesThatThePlanKnows) {
  alignas(4) uint32_t flag = 0;
  const Program p = ProgramBuilder(1).Devices(2).Await(0, "receive", &flag, 1);
  const Notice other{};
  const Peers one(nullptr, {{"process 0", -1, &other}}, 60);
  for (const auto& [process, peers] : {std::pair<int, const Peers*>{0, nullptr}, {1, &one}, {-2, &one}}) {
    auto device = HostDevice::Create(p, {}, false, {HostDevice::kOwnProcess, process});
    ASSERT_TRUE(device.ok());
    const Status status = (*device)->Run(p, {.peers = peers});
    EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    EXPECT_EQ(status.message(),
              StrCat("operator 'receive' (command 0): process ", process, " is none of the plan's peers"));
  }
}

TEST(HostDevice, SaysThatThereIsNoThreadForAStream) {
  for (const int threads : {0, 3}) {
    const ThreadLimit limit(threads);
    const auto device = HostDevice::Create(ProgramBuilder(4), {});
    EXPECT_EQ(device.status().code(), Code::kInternal);
    EXPECT_THAT(device.status().message(),
                HasSubstr("program 'test': cannot start a thread for each stream: "));
  }
  EXPECT_TRUE(HostDevice::Create(ProgramBuilder(4), {}).ok());
}

TEST(HostDevice, AFlagOrdersStreamsAndIsCleared) {
  alignas(4) uint32_t flag = 0;
  int made = 0, seen = 0;
  const auto program = OnHost(ProgramBuilder(2)
                                  .Launch(0, "makes", {}, {Memory(&made, 4)})
                                  .Signal(0, "send", &flag)
                                  .Await(1, "receive", &flag)
                                  .Launch(1, "takes", {}, {Memory(&seen, 4)}),
                              {[&] {
                                 ++made;
                                 return Status();
                               },
                               [&] {
                                 seen = made;
                                 return Status();
                               }});
  for (int i = 1; i <= 500; ++i) {
    ASSERT_TRUE(program->Run({}).ok());
    ASSERT_EQ(seen, i);
    ASSERT_EQ(flag, 0u);
  }
}

TEST(HostDevice, AnAwaitEndsWithTheRunOrTheTime) {
  alignas(4) uint32_t flag = 0;
  const auto fails =
      OnHost(ProgramBuilder(3).Launch(0, "fails").Await(1, "receive", &flag).Record(1, 0).Wait(2, 0),
             {[] { return Internal("out of luck"); }});
  for (int i = 0; i < 50; ++i)
    EXPECT_EQ(fails->Run({}).message(), "operator 'fails' (command 0): out of luck");
  const auto alone = OnHost(ProgramBuilder(1).Devices(3).Await(0, "receive", &flag, 2), {});
  EXPECT_EQ(alone->Run({.timeout = 0.05}).message(),
            "operator 'receive' (command 0): device 2 of the program did not answer within 0.05 s");
}

TEST(HostDevice, TakesTimes) {
  const auto sleeps = [] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return Status();
  };
  // a and b at once; c after a, and after b.
  const auto program =
      OnHost(ProgramBuilder(2).Launch(0, "a").Launch(1, "b").Record(1, 0).Wait(0, 0).Launch(0, "c"),
             {sleeps, sleeps, sleeps}, /*timed=*/true);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(program->Run({}).ok());
    const auto times = program->Times();
    ASSERT_TRUE(times.ok()) << times.status().message();
    ASSERT_EQ(times.value().size(), 3u) << "events are about order only";
    const auto &a = times.value()[0], &b = times.value()[1], &c = times.value()[2];
    EXPECT_EQ(c.command, 4u);
    for (const CommandTime& t : times.value()) {
      EXPECT_GE(t.begin_us, 0);
      EXPECT_GE(t.end_us - t.begin_us, 20'000);
    }
    EXPECT_GE(c.begin_us, std::max(a.end_us, b.end_us));
  }
}

TEST(HostDevice, CommandsThatRunAtOnceHaveTimesThatOverlap) {
  std::latch both(2);
  const auto meet = [&] {
    both.arrive_and_wait();
    return Status();
  };
  const auto program = OnHost(ProgramBuilder(2).Launch(0, "a").Launch(1, "b"), {meet, meet}, /*timed=*/true);
  ASSERT_TRUE(program->Run({}).ok());
  const auto times = program->Times();
  ASSERT_TRUE(times.ok());
  EXPECT_LT(times.value()[0].begin_us, times.value()[1].end_us);
  EXPECT_LT(times.value()[1].begin_us, times.value()[0].end_us);
}

TEST(HostDevice, SaysWhyThereAreNoTimes) {
  bool fail = true;
  const HostPartition moody = [&] { return fail ? Internal("not now") : Status(); };
  const Program p = ProgramBuilder(1).Launch(0, "moody");
  EXPECT_EQ(OnHost(p, {moody})->Times().status().message(), "program 'test' was not added with timed=True");
  const auto program = OnHost(p, {moody}, /*timed=*/true);
  EXPECT_EQ(program->Times().status().message(), "program 'test' has not run yet");
  EXPECT_FALSE(program->Run({}).ok());
  EXPECT_EQ(program->Times().status().message(), "program 'test': the last run failed");
  fail = false;
  EXPECT_TRUE(program->Run({}).ok());
  EXPECT_TRUE(program->Times().ok());
}

TEST(Executor, ChecksTheCall) {
  int pinned = 0, other = 0;
  const auto program = OnHost(
      ProgramBuilder(1).PinnedInput(reinterpret_cast<uint64_t>(&pinned), 4).MovingInput(4).Output(4, 1), {});
  void* good[] = {&pinned, &other};
  void* moved[] = {&other, &other};
  void* out[] = {&other};
  void* elsewhere[] = {&pinned};
  EXPECT_TRUE(program->Matches({.inputs = good, .outputs = out}));
  EXPECT_FALSE(program->Matches({.inputs = moved, .outputs = out}));
  EXPECT_TRUE(program->Run({.inputs = good, .outputs = out}).ok());
  EXPECT_THAT(program->Run({.inputs = moved, .outputs = out}).message(),
              HasSubstr("pinned input 0 has moved"));
  EXPECT_THAT(program->Run({.inputs = good, .outputs = elsewhere}).message(),
              HasSubstr("does not lie in its donor"));
  EXPECT_THAT(program->Run({.outputs = out}).message(), HasSubstr("takes 2 inputs, not 0"));
  EXPECT_THAT(program->Run({.inputs = good}).message(), HasSubstr("gives 1 outputs, not 0"));
  EXPECT_FALSE(program->Matches({.inputs = good}));
}

TEST(Executor, ChecksWhereOutputsAre) {
  int pinned = 0, other = 0;
  const auto program =
      OnHost(ProgramBuilder(1).Output(4).Output(4, /*donor=*/-1, reinterpret_cast<uint64_t>(&pinned)), {});
  void* good[] = {&other, &pinned};
  void* moved[] = {&pinned, &other};
  EXPECT_TRUE(program->Matches({.outputs = good}));
  EXPECT_FALSE(program->Matches({.outputs = moved}));
  EXPECT_TRUE(program->Run({.outputs = good}).ok());
  EXPECT_THAT(program->Run({.outputs = moved}).message(), HasSubstr("pinned output 1 has moved"));
}

}  // namespace
}  // namespace dynaflow
