#include "xla_ffi/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "xla_ffi/tests/programs.h"
#include "xla_ffi/tests/thread_limit.h"

namespace dynaflow {
namespace {

using namespace std::chrono_literals;

// A device whose run goes on until somebody ends it, or for ever, or fails.
struct Runner final : Device {
  Status Run(const Program&, const Call&) override { return {}; }
  std::string Mode() const override { return "pretended"; }
  void Release(const Program&) override {
    if (++releases >= 3 && releasable) busy = false;
  }
  bool Idle() const override { return !busy; }
  Status Failure(const Program&) override {
    ++looks;
    return failed ? Internal("burnt out") : Status();
  }

  std::atomic<bool> busy = true, failed = false;
  std::atomic<int> releases = 0, looks = 0;
  bool releasable = true;
};

struct Pair {
  Pair() {
    for (int d = 0; d < 2; ++d) {
      auto device = std::make_unique<Runner>();
      devices[d] = device.get();
      executors[d] = std::make_shared<Executor>(ProgramBuilder(0), std::move(device));
    }
  }
  std::vector<Watchdog::Part> Run() const { return {{4, executors[0]}, {5, executors[1]}}; }
  void AwaitRelease() const {
    while (devices[0]->busy || devices[1]->busy) std::this_thread::yield();
  }

  std::array<Runner*, 2> devices;
  std::array<std::shared_ptr<Executor>, 2> executors;
};

struct Reports {
  std::function<void(const Status&)> Listener() {
    return [this](const Status& status) {
      if (++count == 1) first.set_value(status.message());
    };
  }
  std::atomic<int> count = 0;
  std::promise<std::string> first;
};

TEST(Watchdog, ReportsAFailureAndReleasesThePeers) {
  Pair pair;
  Reports reports;
  Watchdog watchdog(reports.Listener(), 1ms, 1min);
  EXPECT_TRUE(watchdog.Watch(pair.Run()).ok());
  std::this_thread::sleep_for(10ms);
  EXPECT_EQ(reports.count, 0);
  EXPECT_EQ(pair.devices[0]->releases, 0);
  pair.devices[1]->failed = true;
  EXPECT_EQ(reports.first.get_future().get(), "device 5: burnt out");
  while (pair.devices[0]->busy) std::this_thread::yield();
  std::this_thread::sleep_for(10ms);
  EXPECT_EQ(reports.count, 1);
}

TEST(Watchdog, GivesUpOnPeersThatCannotBeReleased) {
  Pair pair;
  pair.devices[0]->releasable = false;
  pair.devices[1]->failed = true;
  Reports reports;
  {
    Watchdog watchdog(reports.Listener(), 1ms, 20ms);
    EXPECT_TRUE(watchdog.Watch(pair.Run()).ok());
    reports.first.get_future().wait();
    std::this_thread::sleep_for(50ms);
    EXPECT_EQ(reports.count, 1);
  }
  EXPECT_TRUE(pair.devices[0]->busy);
}

TEST(Watchdog, FailuresOfAllDevicesAreOne) {
  Pair pair;
  for (Runner* device : pair.devices) device->failed = true;
  Reports reports;
  Watchdog watchdog(reports.Listener(), 1ms, 1min);
  EXPECT_TRUE(watchdog.Watch(pair.Run()).ok());
  EXPECT_EQ(reports.first.get_future().get(), "device 4: burnt out");
}

// Another process, as far as the watchdog knows one.
struct OtherProcess {
  explicit OtherProcess(double timeout)
      : peers(std::make_shared<Peers>(&own, std::vector<Peers::Process>{{"process 1", ends[0], &other}},
                                      timeout)) {}
  ~OtherProcess() {
    close(ends[0]);
    close(ends[1]);
  }
  // A pipe can be read from once its other end has written, as a pidfd can once its process has ended.
  void End() { EXPECT_EQ(write(ends[1], "x", 1), 1); }

  Notice own{}, other{};
  int ends[2] = {-1, -1};
  const int opened = pipe(ends);
  std::shared_ptr<Peers> peers;
};

TEST(Watchdog, ARunMayEndWithoutAProcessThatHasEnded) {
  Pair pair;
  Reports reports;
  OtherProcess other(60);
  Watchdog watchdog(reports.Listener(), 1ms, 1min);
  EXPECT_TRUE(watchdog.Watch(pair.Run(), other.peers).ok());
  other.End();
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(reports.count, 0) << "what the run needs of it may be there already";
  for (Runner* device : pair.devices) device->busy = false;
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(reports.count, 0);
}

TEST(Watchdog, ReleasesARunThatWaitsForAProcessThatHasEnded) {
  Pair pair;
  Reports reports;
  OtherProcess other(60);
  Watchdog watchdog(reports.Listener(), 1ms, 30ms);
  EXPECT_TRUE(watchdog.Watch(pair.Run(), other.peers).ok());
  other.End();
  EXPECT_EQ(reports.first.get_future().get(), "process 1 has ended");
  pair.AwaitRelease();
}

TEST(Watchdog, ReleasesARunThatWaitsForAProcessThatFailed) {
  Pair pair;
  Reports reports;
  OtherProcess other(60);
  Watchdog watchdog(reports.Listener(), 1ms, 30ms);
  EXPECT_TRUE(watchdog.Watch(pair.Run(), other.peers).ok());
  Peers(&other.other, {}, 60).Fail(Internal("out of luck"));
  EXPECT_EQ(reports.first.get_future().get(), "process 1: out of luck");
  pair.AwaitRelease();
}

TEST(Watchdog, ReleasesARunThatWaitsTooLong) {
  Pair pair;
  Reports reports;
  OtherProcess other(0.02);
  Watchdog watchdog(reports.Listener(), 1ms, 1min);
  EXPECT_TRUE(watchdog.Watch(pair.Run(), other.peers).ok());
  EXPECT_THAT(reports.first.get_future().get(),
              testing::StartsWith("process 1 is alive, but did not answer within 0.02 s"));
  pair.AwaitRelease();
}

TEST(Watchdog, SleepsOnceARunIsOverAndWatchesTheNext) {
  Pair first, second;
  Reports reports;
  Watchdog watchdog(reports.Listener(), 1ms, 1min);
  EXPECT_TRUE(watchdog.Watch(first.Run()).ok());
  for (Runner* device : first.devices) device->busy = false;
  for (int before = -1; before != first.devices[0]->looks; std::this_thread::sleep_for(200ms)) {
    before = first.devices[0]->looks;
  }
  first.devices[0]->failed = true;  // nobody asks any more
  std::this_thread::sleep_for(10ms);
  EXPECT_EQ(reports.count, 0);
  EXPECT_TRUE(watchdog.Watch(second.Run()).ok());
  second.devices[0]->failed = true;
  EXPECT_EQ(reports.first.get_future().get(), "device 4: burnt out");
}

TEST(Watchdog, SaysThatItHasNoThread) {
  Pair pair;
  Reports reports;
  Watchdog watchdog(reports.Listener(), 1ms, 1min);
  {
    const ThreadLimit none(0);
    EXPECT_THAT(watchdog.Watch(pair.Run()).message(), testing::StartsWith("cannot start the thread"));
  }
  EXPECT_TRUE(watchdog.Watch(pair.Run()).ok());
  pair.devices[1]->failed = true;
  EXPECT_EQ(reports.first.get_future().get(), "device 5: burnt out");
}

TEST(Watchdog, KeepsNothingAlive) {
  Reports reports;
  Watchdog watchdog(reports.Listener(), 1ms, 1min);
  auto pair = std::make_unique<Pair>();
  const std::weak_ptr<Executor> executor = pair->executors[0];
  EXPECT_TRUE(watchdog.Watch(pair->Run()).ok());
  pair.reset();
  while (!executor.expired()) std::this_thread::yield();  // it may be looking just now
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(reports.count, 0);
}

TEST(Watchdog, EndsWhileADeviceIsBusy) {
  Pair pair;
  Reports reports;
  Watchdog watchdog(reports.Listener(), 1h, 1h);
  EXPECT_TRUE(watchdog.Watch(pair.Run()).ok());
}

TEST(Watchdog, RunsFollowOneAnother) {
  Pair pair;
  Reports reports;
  Watchdog watchdog(reports.Listener(), 10us, 1min);
  for (int i = 0; i < 5000; ++i) EXPECT_TRUE(watchdog.Watch(pair.Run()).ok());
  EXPECT_EQ(reports.count, 0);
}

}  // namespace
}  // namespace dynaflow
