#include "xla_ffi/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <stdexcept>
#include <thread>
#include <vector>

#include "xla_ffi/host_device.h"
#include "xla_ffi/tests/programs.h"

namespace dynaflow {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<Executor> OneOperator(HostPartition work, std::shared_ptr<void> keep_alive = nullptr) {
  Program program = ProgramBuilder(1).Launch(0, "op");
  auto device = HostDevice::Create(program, {std::move(work)});
  return std::make_shared<Executor>(std::move(program), std::move(*device), std::move(keep_alive));
}

std::shared_ptr<Executor> PinnedAt(const void* address) {
  Program program = ProgramBuilder(0).PinnedInput(reinterpret_cast<uint64_t>(address), 4);
  auto device = HostDevice::Create(program, {});
  return std::make_shared<Executor>(std::move(program), std::move(*device));
}

TEST(Registry, FindsWhatItWasGiven) {
  Registry registry;
  auto plan = std::make_shared<Plan>(nullptr, 1);
  const int64_t id = registry.Add(plan);
  EXPECT_EQ(registry.Find(id).value(), plan);
  EXPECT_TRUE(registry.Free(id).ok());
  EXPECT_EQ(registry.size(), 0u);
  EXPECT_EQ(registry.Find(id).value(), plan) << "who holds it may want another program";
  EXPECT_THAT(registry.Free(id).message(), HasSubstr(StrCat("no plan ", id)));
  plan.reset();
  EXPECT_EQ(registry.Find(id).status().code(), Code::kNotFound);
  EXPECT_NE(registry.Add(std::make_shared<Plan>(nullptr, 1)), id)
      << "an id must not come back: a stale call would run another plan";
}

TEST(Registry, ClearingClosesWhatOthersHold) {
  Registry registry;
  const auto plan = std::make_shared<Plan>(nullptr, 1);
  auto kept = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = kept;
  plan->Add(0, OneOperator([] { return Status(); }, std::move(kept)));
  EXPECT_TRUE(registry.Free(registry.Add(plan)).ok());
  EXPECT_TRUE(plan->Run({}).ok());
  registry.Clear();
  EXPECT_TRUE(watch.expired());
  EXPECT_THAT(plan->Run({}).message(), HasSubstr("about to exit"));
}

TEST(Registry, FreeingWhileRunningIsSafe) {
  Registry registry;
  auto plan = std::make_shared<Plan>(nullptr, 1);
  auto kept = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = kept;
  std::latch started(1), freed(1);
  plan->Add(0, OneOperator(
                   [&] {
                     started.count_down();
                     freed.wait();
                     return watch.expired() ? Internal("freed under our feet") : Status();
                   },
                   std::move(kept)));
  const int64_t id = registry.Add(std::move(plan));
  std::thread runner([&] {
    auto found = registry.Find(id);
    const Status status = (*found)->Run({});
    EXPECT_TRUE(status.ok()) << status.message();
  });
  started.wait();
  EXPECT_TRUE(registry.Free(id).ok());
  freed.count_down();
  runner.join();
  EXPECT_TRUE(watch.expired());
}

TEST(Registry, ClearingWaitsForRunsUnderWay) {
  Registry registry;
  auto plan = std::make_shared<Plan>(nullptr, 1);
  std::latch started(1);
  std::atomic<bool> over = false;
  plan->Add(0, OneOperator([&] {
              started.count_down();
              std::this_thread::sleep_for(std::chrono::milliseconds(50));
              over = true;
              return Status();
            }));
  registry.Add(plan);
  std::thread runner([&] { EXPECT_TRUE(plan->Run({}).ok()); });
  started.wait();
  registry.Clear();
  EXPECT_TRUE(over);
  runner.join();
}

TEST(Registry, ClearingLetsGoOfWhoWaitsForOthers) {
  Registry registry;
  const auto plan = std::make_shared<Plan>(nullptr, 1, /*participants=*/2);
  registry.Add(plan);
  std::thread runner([&] { EXPECT_THAT(plan->Run({.device = 1}).message(), HasSubstr("about to exit")); });
  std::this_thread::sleep_for(
      std::chrono::milliseconds(20));  // it makes no difference if it has not come yet
  registry.Clear();
  runner.join();
}

TEST(Registry, SurvivesManyThreads) {
  Registry registry;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        auto plan = std::make_shared<Plan>(nullptr, 1);
        plan->Add(0, OneOperator([] { return Status(); }));
        const int64_t id = registry.Add(std::move(plan));
        EXPECT_TRUE((*registry.Find(id))->Run({}).ok());
        EXPECT_TRUE(registry.Free(id).ok());
      }
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(registry.size(), 0u);
}

TEST(Plan, SaysWhenNothingFits) {
  Plan plan(nullptr, 1);
  EXPECT_THAT(plan.Run({.device = 3}).message(), HasSubstr("no program for these inputs on device 3"));
}

TEST(Plan, KeepsAProgramForEachAddressAndForgetsTheOldest) {
  int a, b, c;
  Plan* self = nullptr;
  int captures = 0;
  Plan plan(
      [&](std::span<const Call> calls) {
        ++captures;
        self->Add(calls[0].device, PinnedAt(calls[0].inputs[0]));
        return Status();
      },
      /*capacity=*/2);
  self = &plan;
  auto run = [&](void* address, int device = 0) {
    EXPECT_TRUE(plan.Run({.device = device, .inputs = std::span<void* const>(&address, 1)}).ok());
  };
  run(&a);
  run(&a);
  EXPECT_EQ(captures, 1);
  run(&b);
  run(&a);
  EXPECT_EQ(captures, 2);
  run(&c);  // b is the oldest
  run(&a);
  EXPECT_EQ(captures, 3);
  run(&b);
  EXPECT_EQ(captures, 4);
  run(&b, /*device=*/1);
  EXPECT_EQ(captures, 5);
  EXPECT_EQ(plan.stats().misses, 5u);
  EXPECT_EQ(plan.stats().evictions, 2u);
  EXPECT_EQ(plan.stats().programs, 3u);
  EXPECT_EQ(plan.stats().runs, 8u);
  plan.Forget();
  EXPECT_EQ(plan.stats().evictions, 5u);
  EXPECT_EQ(plan.stats().programs, 0u);
  run(&b);
  EXPECT_EQ(captures, 6);
}

TEST(Plan, CapturesOnceForThreadsThatMissTogether) {
  Plan* self = nullptr;
  std::atomic<int> captures = 0;
  Plan plan(
      [&](std::span<const Call> calls) {
        ++captures;
        self->Add(calls[0].device, OneOperator([] { return Status(); }));
        return Status();
      },
      4);
  self = &plan;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) threads.emplace_back([&] { EXPECT_TRUE(plan.Run({}).ok()); });
  for (auto& t : threads) t.join();
  EXPECT_EQ(captures, 1);
}

TEST(Plan, PassesTheOwnersErrorOn) {
  Plan plan([](std::span<const Call>) { return Internal("out of memory in the private pool"); }, 1);
  EXPECT_EQ(plan.Run({}).message(), "out of memory in the private pool");
}

TEST(Plan, ClosesAfterAnOwnerThatThrew) {
  Plan plan([](std::span<const Call>) -> Status { throw std::runtime_error("as programmed"); }, 1);
  EXPECT_EQ(plan.Run({}).message(), "as programmed");
  const auto before = std::chrono::steady_clock::now();
  plan.Close();
  EXPECT_LT(std::chrono::steady_clock::now() - before, Seconds(kDefaultTimeout / 2)) << "no run is under way";
}

TEST(Plan, ChecksThatTheNewProgramFits) {
  Plan plan([](std::span<const Call>) { return Status(); }, 1);
  EXPECT_THAT(plan.Run({}).message(), HasSubstr("does not fit"));
}

}  // namespace
}  // namespace dynaflow
