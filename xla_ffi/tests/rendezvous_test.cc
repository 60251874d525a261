#include "xla_ffi/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "xla_ffi/host_device.h"
#include "xla_ffi/order.h"
#include "xla_ffi/registry.h"
#include "xla_ffi/tests/programs.h"
#include "xla_ffi/tests/thread_limit.h"

namespace dynaflow {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

using Row = std::array<uint64_t, 16>;
constexpr uint64_t kBytes = sizeof(Row);
constexpr double kPatient = 60, kHasty = 0.05;

enum class Pattern { kAllGather, kRing };

// Devices that send each other their input and give the sum of what they have, every sender's times its
// number.
class Exchange {
 public:
  using Operator = std::function<Status(int device)>;

  Exchange(Pattern pattern, int devices, Operator before_sum = nullptr, double timeout = kPatient)
      : pattern_(pattern), devices_(devices), before_sum_(std::move(before_sum)), memory_(devices) {
    for (Memory_& m : memory_) {
      m.gathered.resize(devices);
      m.ready = std::vector<uint32_t>(devices);
      m.arrived = std::vector<uint32_t>(devices);
    }
    plan = std::make_shared<Plan>(
        [this](std::span<const Call> calls) {
          EXPECT_EQ(calls.size(), memory_.size());
          ++misses;
          for (const Call& call : calls) Add(call.device);
          return Status();
        },
        /*capacity=*/1, devices, timeout);
  }

  // One device's part of a run; empty if all is right, else what is not.
  std::string Run(int device, int64_t run) {
    Row in, out{};
    in.fill(Value(device, run));
    void* inputs[] = {in.data()};
    void* outputs[] = {out.data()};
    const Status status = plan->Run({.device = device, .inputs = inputs, .outputs = outputs, .run_id = run});
    if (!status.ok()) return status.message();
    uint64_t expected = 0;
    for (int from = 0; from < devices_; ++from) {
      if (Sends(from, device) || from == device) expected += (from + 1) * Value(from, run);
    }
    return std::all_of(out.begin(), out.end(), [&](uint64_t v) { return v == expected; }) ? "" : "wrong sum";
  }

  // All devices' parts, each in a thread of its own, many times.
  std::vector<std::string> RunAll(int runs, int64_t first = 0) {
    std::vector<std::string> errors(devices_);
    std::vector<std::thread> threads;
    for (int d = 0; d < devices_; ++d) {
      threads.emplace_back([&, d] {
        for (int r = 0; r < runs && errors[d].empty(); ++r) errors[d] = Run(d, first + r);
      });
    }
    for (auto& t : threads) t.join();
    return errors;
  }

  std::shared_ptr<Plan> plan;
  std::atomic<int> misses = 0;

 private:
  struct Memory_ {
    Row own, sum;
    std::vector<Row> gathered;
    std::vector<uint32_t> ready;    // by device: that there is room for this device's row
    std::vector<uint32_t> arrived;  // by device: that its row is here
  };

  bool Sends(int from, int to) const {
    if (from == to) return false;
    return pattern_ == Pattern::kAllGather || to == (from + 1) % devices_;
  }
  static uint64_t Value(int device, int64_t run) { return 1000 * static_cast<uint64_t>(run) + device; }

  void Add(int d) {
    Memory_& m = memory_[d];
    ProgramBuilder b(2);
    b.Devices(devices_).MovingInput(kBytes).Output(kBytes);
    b.Copy(0, "input", Memory(&m.own, kBytes), InputBytes(0, 0, kBytes));
    b.Copy(0, "own", Memory(&m.gathered[d], kBytes), Memory(&m.own, kBytes)).Record(0, 0);
    for (int e = 0; e < devices_; ++e) {
      if (Sends(e, d)) b.Signal(1, "room", &memory_[e].ready[d], e);
    }
    std::vector<Range> all = {Memory(&m.gathered[d], kBytes)};
    for (int e = 0; e < devices_; ++e) {
      if (!Sends(d, e)) continue;
      b.Await(0, "wait for room", &m.ready[e], e)
          .Copy(0, "send", Memory(&memory_[e].gathered[d], kBytes), Memory(&m.own, kBytes), e)
          .Signal(0, "sent", &memory_[e].arrived[d], e);
    }
    for (int e = 0; e < devices_; ++e) {
      if (!Sends(e, d)) continue;
      b.Await(1, "receive", &m.arrived[e], e, {Memory(&m.gathered[e], kBytes)});
      all.push_back(Memory(&m.gathered[e], kBytes));
    }
    b.Wait(1, 0).Launch(1, "sum", all, {Memory(&m.sum, kBytes)});
    b.Copy(1, "output", OutputBytes(0, 0, kBytes), Memory(&m.sum, kBytes));
    Program program = b;
    EXPECT_TRUE(Validate(program).ok()) << Validate(program).message();
    EXPECT_TRUE(CheckOverlap(program).ok()) << CheckOverlap(program).message();
    auto device = HostDevice::Create(program, {[this, d] { return Sum(d); }});
    plan->Add(d, std::make_shared<Executor>(std::move(program), std::move(*device)));
  }

  Status Sum(int d) {
    if (before_sum_) DYNAFLOW_RETURN_IF_ERROR(before_sum_(d));
    Memory_& m = memory_[d];
    m.sum.fill(0);
    for (int from = 0; from < devices_; ++from) {
      if (!Sends(from, d) && from != d) continue;
      for (size_t i = 0; i < m.sum.size(); ++i) m.sum[i] += (from + 1) * m.gathered[from][i];
    }
    return {};
  }

  const Pattern pattern_;
  const int devices_;
  const Operator before_sum_;
  std::vector<Memory_> memory_;
};

TEST(Rendezvous, DevicesExchange) {
  for (const auto& [devices, runs] : {std::pair{2, 1500}, {3, 300}, {8, 100}}) {
    for (Pattern pattern : {Pattern::kAllGather, Pattern::kRing}) {
      Exchange exchange(pattern, devices);
      EXPECT_THAT(exchange.RunAll(runs), Each(IsEmpty())) << devices;
      EXPECT_EQ(exchange.misses, 1);
      EXPECT_EQ(exchange.plan->stats().runs, static_cast<uint64_t>(devices) * runs);
      EXPECT_EQ(exchange.plan->stats().programs, static_cast<size_t>(devices));
      EXPECT_EQ(exchange.plan->stats().broken, "");
    }
  }
}

TEST(Rendezvous, PlansFromSeveralThreadsStayApart) {
  Exchange a(Pattern::kAllGather, 2), b(Pattern::kRing, 3), c(Pattern::kAllGather, 4);
  std::vector<std::thread> threads;
  for (Exchange* each : {&a, &b, &c, &a})  // two threads call the first plan, in runs of their own
    threads.emplace_back([each, first = 1000 * threads.size()] {
      EXPECT_THAT(each->RunAll(100, static_cast<int64_t>(first)), Each(IsEmpty()));
    });
  for (auto& t : threads) t.join();
}

TEST(Rendezvous, TheOrderOfArrivalDoesNotMatter) {
  Exchange a(Pattern::kAllGather, 2), b(Pattern::kAllGather, 2);
  for (int run = 0; run < 50; ++run) {
    std::vector<std::thread> threads;
    const auto call = [&](Exchange& plan, int device) {
      threads.emplace_back([&plan, device, run] { EXPECT_EQ(plan.Run(device, run), ""); });
    };
    // Device 0 comes to A first, device 1 to B.
    call(a, 0);
    call(b, 1);
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    call(b, 0);
    call(a, 1);
    for (auto& t : threads) t.join();
  }
}

TEST(Rendezvous, SaysWhoCameAndIsBrokenThen) {
  Exchange exchange(Pattern::kAllGather, 3, nullptr, kHasty);
  std::string other_run;
  std::thread other([&] { other_run = exchange.Run(2, 1); });
  std::string in_time;
  std::thread second([&] { in_time = exchange.Run(2, 0); });
  const std::string error = exchange.Run(0, 0);
  second.join();
  other.join();
  // Whichever waited longest speaks for all.
  EXPECT_THAT(error,
              AllOf(StartsWith("a communicating plan is run by 3 devices together, but within 0.05 s only"),
                    HasSubstr("timeout_s")));
  EXPECT_EQ(in_time, error);
  EXPECT_EQ(other_run, error);
  EXPECT_EQ(exchange.plan->stats().broken, error);
  EXPECT_THAT(exchange.RunAll(1, 7), Each(error)) << "a broken plan fails at once";
  EXPECT_EQ(exchange.misses, 0);
}

TEST(Rendezvous, NamesTheDevicesThatCame) {
  Exchange exchange(Pattern::kAllGather, 2, nullptr, kHasty);
  EXPECT_THAT(exchange.Run(1, 0), HasSubstr("only 1 has come (device 1)"));
}

TEST(Rendezvous, AFailingOperatorEndsTheRunOfAll) {
  for (int failing : {0, 2}) {
    std::atomic<bool> fail = false;
    Exchange exchange(Pattern::kRing, 3, [&](int device) {
      return fail && device == failing ? Internal("out of luck") : Status();
    });
    EXPECT_THAT(exchange.RunAll(20), Each(IsEmpty()));
    fail = true;
    const std::string error = StrCat("device ", failing, ": operator 'sum'");
    EXPECT_THAT(exchange.RunAll(1, 100), Each(AllOf(StartsWith(error), HasSubstr("out of luck"))));
    fail = false;
    EXPECT_THAT(exchange.RunAll(1, 101), Each(StartsWith(error))) << "the flags' state is unknown";
    EXPECT_THAT(exchange.plan->stats().broken, StartsWith(error));
  }
}

TEST(Rendezvous, RefusesOneDeviceTwice) {
  Exchange exchange(Pattern::kAllGather, 2);
  std::string first;
  std::thread other([&] { first = exchange.Run(0, 5); });
  // Whichever of the two comes second finds the other.
  EXPECT_THAT(exchange.Run(0, 5), HasSubstr("device 0 calls a communicating plan twice at once"));
  other.join();
  EXPECT_THAT(first, HasSubstr("twice at once"));
}

// Programs of one operator that does nothing, made by an owner that the test decides on.
class Owned {
 public:
  explicit Owned(std::function<Status(Owned&, std::span<const Call>)> on_miss)
      : plan([this,
              on_miss = std::move(on_miss)](std::span<const Call> calls) { return on_miss(*this, calls); },
             4, 2, kPatient) {}

  void Add(int device) {
    Program program = ProgramBuilder(1).Launch(0, "op");
    auto on = HostDevice::Create(program, {[] { return Status(); }});
    plan.Add(device, std::make_shared<Executor>(std::move(program), std::move(*on)));
  }
  std::vector<std::string> RunBoth(Call call = {}) {
    std::vector<std::string> errors(2);
    std::thread other([&, call]() mutable {
      call.device = 1;
      errors[1] = plan.Run(call).message();
    });
    call.device = 0;
    errors[0] = plan.Run(call).message();
    other.join();
    return errors;
  }

  Plan plan;
};

TEST(Rendezvous, AFailingOwnerFailsAllAndMayTryAgain) {
  int tries = 0;
  Owned owned([&](Owned& self, std::span<const Call> calls) -> Status {
    self.Add(calls[0].device);
    if (++tries == 1) return Internal("no memory");
    self.Add(calls[1].device);
    return {};
  });
  EXPECT_THAT(owned.RunBoth(), Each("no memory"));
  EXPECT_EQ(owned.plan.stats().broken, "");
  EXPECT_THAT(owned.RunBoth(), Each(IsEmpty()));
  EXPECT_EQ(tries, 2);
  EXPECT_EQ(owned.plan.stats().programs, 2u) << "what the first try left is gone";
}

TEST(Rendezvous, AnOwnerThatThrowsFailsAllAndMayTryAgain) {
  int tries = 0;
  Owned owned([&](Owned& self, std::span<const Call> calls) -> Status {
    if (++tries == 1) throw std::runtime_error("as programmed");
    for (const Call& call : calls) self.Add(call.device);
    return {};
  });
  EXPECT_THAT(owned.RunBoth(), Each("as programmed"));
  EXPECT_EQ(owned.plan.stats().broken, "");
  EXPECT_THAT(owned.RunBoth(), Each(IsEmpty())) << "the turn was given back";
}

TEST(Rendezvous, NamesTheDeviceThatGotNoProgram) {
  Owned owned([&](Owned& self, std::span<const Call>) {
    self.Add(0);
    return Status();
  });
  EXPECT_THAT(owned.RunBoth(), Each(HasSubstr("do not fit the call on device 1")));
  EXPECT_THAT(Plan(nullptr, 1, 1).Run({.device = 4}).message(),
              HasSubstr("no program for these inputs on device 4"));
}

TEST(Rendezvous, WaitsForTheInputsOfAllBeforeAMiss) {
  static std::atomic<int> waited;
  waited = 0;
  Owned owned([&](Owned& self, std::span<const Call> calls) {
    EXPECT_EQ(waited, 2);
    for (const Call& call : calls) self.Add(call.device);
    return Status();
  });
  const Call call{.synchronize = [](void*) {
    ++waited;
    return Status();
  }};
  for (int i = 0; i < 3; ++i) EXPECT_THAT(owned.RunBoth(call), Each(IsEmpty()));
  EXPECT_EQ(waited, 2) << "a hit waits for nothing";
}

TEST(Rendezvous, APlanMayGoOnInTheSameRun) {
  Owned owned([&](Owned& self, std::span<const Call> calls) {
    for (const Call& call : calls) self.Add(call.device);
    return Status();
  });
  for (int i = 0; i < 100; ++i) EXPECT_THAT(owned.RunBoth({.run_id = 3}), Each(IsEmpty()));
}

// A device that returns at once, like CUDA, and is busy until its peer lets it go.
struct AsyncDevice final : Device {
  ~AsyncDevice() override { AwaitRelease(); }
  Status Run(const Program&, const Call&) override {
    while (after && !after->waits) std::this_thread::yield();
    if (throws) throw std::runtime_error("as programmed");
    if (fails) return Internal("out of luck");
    waits = true;
    if (blocks) AwaitRelease();
    return {};
  }
  Result<std::vector<CommandTime>> Times(const Program&) override {
    AwaitRelease();
    return std::vector<CommandTime>();
  }
  std::string Mode() const override { return "pretended"; }
  // As with a flag that is awaited three times.
  void Release(const Program&) override {
    if (waits && ++releases == 3) waits = false;
  }
  bool Idle() const override { return !waits; }
  Status Failure(const Program&) override { return burns ? Internal("burnt out") : Status(); }

  // As the driver does where it is asked to wait for a stream; but not for ever.
  void AwaitRelease() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (waits && !burns && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    EXPECT_FALSE(waits && !burns) << "nobody has released it";
  }

  const AsyncDevice* after = nullptr;  // whose run it lets go first
  bool fails = false, throws = false, blocks = false;
  std::atomic<bool> burns = false;
  std::atomic<bool> waits = false;
  std::atomic<int> releases = 0;
};

// A plan of two such devices.
struct AsyncPair {
  explicit AsyncPair(const Program& program = ProgramBuilder(0)) {
    for (int d = 0; d < 2; ++d) {
      auto device = std::make_unique<AsyncDevice>();
      devices[d] = device.get();
      plan.Add(d, std::make_shared<Executor>(program, std::move(device)));
    }
  }

  // What the devices' calls of a run say.
  std::array<std::string, 2> Run() {
    std::array<std::string, 2> errors;
    std::thread other([&] { errors[0] = plan.Run({.device = 0}).message(); });
    errors[1] = plan.Run({.device = 1}).message();
    other.join();
    return errors;
  }

  Plan plan{nullptr, 1, 2, kPatient};
  std::array<AsyncDevice*, 2> devices;
};

TEST(Rendezvous, ADeviceThatCannotLaunchReleasesItsPeers) {
  AsyncPair pair;
  pair.devices[1]->fails = true;
  EXPECT_THAT(pair.Run(), Each("device 1: out of luck"));
  EXPECT_FALSE(pair.devices[0]->waits);
  EXPECT_EQ(pair.plan.stats().broken, "device 1: out of luck");
}

TEST(Rendezvous, ADeviceThatCannotLaunchReleasesAPeerThatBlocks) {
  AsyncPair pair;
  pair.devices[0]->blocks = true;
  pair.devices[1]->after = pair.devices[0];
  pair.devices[1]->fails = true;
  EXPECT_THAT(pair.Run(), Each("device 1: out of luck"));
}

TEST(Rendezvous, ADeviceThatFailsLaterReleasesAPeerWhoseTimesAreWantedNow) {
  AsyncPair pair;
  EXPECT_THAT(pair.Run(), Each(IsEmpty()));
  std::thread other([&] { EXPECT_TRUE(pair.plan.programs()[0].second->Times().ok()); });
  std::this_thread::sleep_for(
      std::chrono::milliseconds(20));  // it makes no difference if it is not there yet
  pair.devices[1]->burns = true;
  other.join();
}

TEST(Rendezvous, ADeviceThatHasFailedReleasesAPeerWhoseProgramIsDropped) {
  const std::function<void(Plan&)> ways[] = {
      [](Plan&) {},  // with the plan
      [](Plan& plan) { plan.Forget(); },
      [](Plan& plan) { plan.Close(); },
      [](Plan& plan) {
        plan.Add(0, std::make_shared<Executor>(ProgramBuilder(0), std::make_unique<AsyncDevice>()));
      },
  };
  for (const auto& drop : ways) {
    AsyncPair pair;
    EXPECT_THAT(pair.Run(), Each(IsEmpty()));
    pair.devices[1]->burns = true;
    drop(pair.plan);
  }
}

TEST(Rendezvous, ARunThatNobodyCanWatchFails) {
  AsyncPair pair;
  std::array<std::string, 2> errors;
  std::latch ready(1);
  std::thread other([&] {
    ready.wait();
    errors[0] = pair.plan.Run({.device = 0}).message();
  });
  const ThreadLimit none(0);
  ready.count_down();
  errors[1] = pair.plan.Run({.device = 1}).message();
  other.join();
  EXPECT_THAT(errors, Each(StartsWith("cannot start the thread")));
  EXPECT_EQ(pair.plan.stats().broken, errors[0]);
  for (AsyncDevice* device : pair.devices) device->waits = false;  // as each has set the other's flag
}

TEST(Rendezvous, ACallThatNoProgramCanRunLaunchesNothing) {
  AsyncPair pair(ProgramBuilder(0).MovingInput(4).Output(4, /*donor=*/0));
  int here = 0, elsewhere = 0;
  const auto run = [&](int* of_device_1) {
    void *donor[] = {&here}, *output[] = {of_device_1};
    std::array<std::string, 2> errors;
    std::thread other(
        [&] { errors[0] = pair.plan.Run({.device = 0, .inputs = donor, .outputs = donor}).message(); });
    errors[1] = pair.plan.Run({.device = 1, .inputs = donor, .outputs = output}).message();
    other.join();
    return errors;
  };
  EXPECT_THAT(run(&here), Each(IsEmpty()));
  EXPECT_THAT(run(&elsewhere), Each("device 1: program 'test': output 0 does not lie in its donor, input 0"));
  EXPECT_EQ(pair.plan.stats().broken, "");
  for (AsyncDevice* device : pair.devices) {
    EXPECT_TRUE(device->waits) << "the run before is still under way";
    EXPECT_EQ(device->releases, 0);
    device->waits = false;
  }
  EXPECT_THAT(run(&here), Each(IsEmpty()));
  for (AsyncDevice* device : pair.devices) device->waits = false;
}

TEST(Rendezvous, ADeviceThatThrowsReleasesItsPeers) {
  AsyncPair pair;
  pair.devices[1]->throws = true;
  EXPECT_THAT(pair.Run(), Each("device 1: as programmed"));
  EXPECT_FALSE(pair.devices[0]->waits);
}

TEST(Rendezvous, ADeviceThatFailsLaterReleasesItsPeers) {
  AsyncPair pair;
  EXPECT_THAT(pair.Run(), Each(IsEmpty()));
  pair.devices[1]->burns = true;
  while (pair.devices[0]->waits) std::this_thread::yield();
  EXPECT_EQ(pair.plan.stats().broken, "device 1: burnt out");
  EXPECT_THAT(pair.Run(), Each("device 1: burnt out"));
}

}  // namespace
}  // namespace dynaflow
