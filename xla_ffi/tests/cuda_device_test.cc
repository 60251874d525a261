#include "xla_ffi/cuda_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <sstream>
#include <thread>
#include <tuple>

#include "xla_ffi/executor.h"
#include "xla_ffi/green_context.h"
#include "xla_ffi/tests/fake_driver.h"
#include "xla_ffi/tests/programs.h"

namespace dynaflow {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

// attention on stream 0, ffn on stream 1 after it, a copy out on stream 0 after that.
Program TwoStreams() {
  return ProgramBuilder(2)
      .MovingInput(64)
      .Output(64)
      .Copy(0, "input", Memory(0x8000, 64), InputBytes(0, 0, 64))
      .Launch(0, "attention", {Memory(0x8000, 64)}, {Memory(0x9000, 64)})
      .Record(0, 0)
      .Wait(1, 0)
      .Launch(1, "ffn", {Memory(0x9000, 64)}, {Memory(0xa000, 64)})
      .Record(1, 1)
      .Wait(0, 1)
      .Copy(0, "output", OutputBytes(0, 0, 64), Memory(0xa000, 64));
}

class CudaDeviceTest : public testing::Test {
 protected:
  void TearDown() override {
    executor_ = nullptr;
    EXPECT_EQ(fake_.live(), 0) << "leaked handles";
    EXPECT_EQ(fake_.pushed(), 0) << "contexts pushed and not popped";
  }

  // Captures are "attention" with a grid of 10, "ffn" with 11, and so on.
  Status Make(const Program& program, const CudaOptions& options = {}, std::vector<int> ordinals = {0}) {
    std::vector<std::shared_ptr<const Capture>> captures;
    for (size_t i = 0; i < program.partitions.size(); ++i) {
      auto capture = std::make_shared<Capture>();
      capture->graph = fake_.NewGraph({{.grid = static_cast<unsigned>(10 + i)}});
      captures.push_back(std::move(capture));
    }
    auto device = CudaDevice::Create(driver_, std::move(ordinals), program, std::move(captures), options);
    if (!device.ok()) return device.status();
    executor_ = std::make_unique<Executor>(program, std::move(*device));
    (void)fake_.TakeLog();
    return {};
  }

  Status Run(uintptr_t input = 0x100, uintptr_t output = 0x200, cuda::Stream stream = nullptr) {
    void* in[] = {reinterpret_cast<void*>(input)};
    void* out[] = {reinterpret_cast<void*>(output)};
    const Program& p = executor_->program();
    return executor_->Run({.stream = stream ? stream : xla_,
                           .inputs = std::span(in).first(p.inputs.size()),
                           .outputs = std::span(out).first(p.outputs.size())});
  }

  cuda::FakeDriver fake_;
  cuda::Driver& driver_ = fake_.driver();
  const cuda::Stream xla_ = fake_.NewStream("xla");
  std::unique_ptr<Executor> executor_;
};

TEST_F(CudaDeviceTest, ForksIssuesAndJoins) {
  ASSERT_TRUE(Make(TwoStreams(), {.one_graph = false}).ok());
  ASSERT_TRUE(Run().ok());
  // e0 forks, e1 says done; e2 and e3 are the program's; e4 and e5 join.
  EXPECT_THAT(fake_.TakeLog(),
              ElementsAre("EventRecord e0 xla", "StreamWaitEvent s0 e0", "StreamWaitEvent s1 e0",  //
                          "MemcpyAsync 32768 256 64 s0",                                           //
                          "GraphLaunch exec(g0) s0",                                               //
                          "EventRecord e2 s0", "StreamWaitEvent s1 e2",                            //
                          "GraphLaunch exec(g1) s1",                                               //
                          "EventRecord e3 s1", "StreamWaitEvent s0 e3",                            //
                          "MemcpyAsync 512 40960 64 s0",                                           //
                          "EventRecord e4 s0", "StreamWaitEvent xla e4",                           //
                          "EventRecord e5 s1", "StreamWaitEvent xla e5",                           //
                          "EventRecord e1 xla"));
  EXPECT_EQ(executor_->Mode(), "streams (not wanted)");
}

TEST_F(CudaDeviceTest, NeverWaitsOnTheHost) {
  for (bool one_graph : {false, true}) {
    ASSERT_TRUE(Make(TwoStreams(), {.one_graph = one_graph}).ok());
    ASSERT_TRUE(Run().ok());
    ASSERT_TRUE(Run().ok());
    EXPECT_THAT(fake_.TakeLog(), Not(Contains(HasSubstr("Synchronize"))));
  }
}

TEST_F(CudaDeviceTest, BuildsOneGraphAndLaunchesIt) {
  ASSERT_TRUE(Make(TwoStreams()).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(fake_.TakeLog(),
              ElementsAre("GraphCreate", "AddMemcpyNode 32768 256 64", "AddChildNode g0", "AddChildNode g1",
                          "AddMemcpyNode 512 40960 64", "GraphInstantiate g2", "GraphLaunch exec(g2) xla",
                          "EventRecord e1 xla"));
  EXPECT_EQ(executor_->Mode(), "one graph");
}

TEST_F(CudaDeviceTest, OneGraphFollowsStreamsAndEvents) {
  ASSERT_TRUE(Make(ProgramBuilder(3)
                       .Launch(0, "a")
                       .Record(0, 0)
                       .Launch(0, "b")
                       .Wait(1, 0)
                       .Launch(1, "c")
                       .Record(1, 1)
                       .Wait(0, 1)
                       .Wait(0, 0)
                       .Launch(0, "d")
                       .Launch(2, "e"))
                  .ok());
  ASSERT_TRUE(Run().ok());
  const auto& n = fake_.NodesOf(fake_.launched());
  ASSERT_EQ(n.size(), 5u);
  EXPECT_THAT(fake_.Node(n[0]).after, IsEmpty());
  EXPECT_THAT(fake_.Node(n[1]).after, ElementsAre(n[0]));
  EXPECT_THAT(fake_.Node(n[2]).after, ElementsAre(n[0]));
  EXPECT_THAT(fake_.Node(n[3]).after, ElementsAre(n[1], n[2]));
  EXPECT_THAT(fake_.Node(n[4]).after, IsEmpty());
}

TEST_F(CudaDeviceTest, PatchesOnlyTheAddressesThatMoved) {
  ASSERT_TRUE(Make(TwoStreams()).ok());
  ASSERT_TRUE(Run(0x100, 0x200).ok());
  (void)fake_.TakeLog();
  ASSERT_TRUE(Run(0x100, 0x200).ok());
  EXPECT_THAT(fake_.TakeLog(),
              ElementsAre("EventQuery e1", "GraphLaunch exec(g2) xla", "EventRecord e1 xla"));
  ASSERT_TRUE(Run(0x300, 0x200).ok());
  EXPECT_THAT(fake_.TakeLog(), ElementsAre("EventQuery e1", "GraphExecSetMemcpy 32768 768 64",
                                           "GraphLaunch exec(g2) xla", "EventRecord e1 xla"));
}

TEST_F(CudaDeviceTest, RunsOnAnotherStreamFollowTheLastOne) {
  ASSERT_TRUE(Make(TwoStreams()).ok());
  ASSERT_TRUE(Run().ok());
  (void)fake_.TakeLog();
  ASSERT_TRUE(Run(0x100, 0x200, fake_.NewStream("xla2")).ok());
  EXPECT_THAT(fake_.TakeLog(), ElementsAre("EventQuery e1", "StreamWaitEvent xla2 e1",
                                           "GraphLaunch exec(g2) xla2", "EventRecord e1 xla2"));
}

TEST_F(CudaDeviceTest, ProgramsOfADeviceTakeTurns) {
  ASSERT_TRUE(Make(TwoStreams()).ok());
  auto first = std::move(executor_);
  ASSERT_TRUE(Make(TwoStreams()).ok());
  ASSERT_TRUE(Run().ok());
  std::swap(executor_, first);
  (void)fake_.TakeLog();
  ASSERT_TRUE(Run(0x100, 0x200, fake_.NewStream("xla2")).ok());
  EXPECT_EQ(fake_.TakeLog()[0], "StreamWaitEvent xla2 e3") << "e3 is the end of the other program's run";
}

TEST_F(CudaDeviceTest, AFailedLaunchNamesTheOperatorAndStillJoins) {
  ASSERT_TRUE(Make(TwoStreams(), {.one_graph = false}).ok());
  fake_.FailOn("GraphLaunch", cuda::FakeDriver::kBroken, /*skip=*/1);
  const Status status = Run();
  EXPECT_THAT(status.message(),
              AllOf(StartsWith("program 'test': operator 'ffn' (command 4): GraphLaunch failed"),
                    HasSubstr("CUDA_ERROR_FAKE (700, as the test wanted)")));
  const auto log = fake_.TakeLog();
  EXPECT_THAT(log, Contains("StreamWaitEvent xla e4"));
  EXPECT_THAT(log, Contains("StreamWaitEvent xla e5"));
  EXPECT_EQ(log.back(), "EventRecord e1 xla");
}

TEST_F(CudaDeviceTest, EveryFailingCallSurfaces) {
  for (const char* call : {"EventRecord", "StreamWaitEvent", "MemcpyAsync", "GraphLaunch"}) {
    for (int skip = 0; skip < 2; ++skip) {
      ASSERT_TRUE(Make(TwoStreams(), {.one_graph = false}).ok());
      fake_.FailOn(call, cuda::FakeDriver::kBroken, skip);
      EXPECT_THAT(Run().message(), HasSubstr(StrCat(call, " failed"))) << skip;
      fake_.Heal();
    }
  }
  for (const char* call : {"GraphLaunch", "EventRecord"}) {
    ASSERT_TRUE(Make(TwoStreams()).ok());
    fake_.FailOn(call);
    EXPECT_THAT(Run().message(), HasSubstr(StrCat(call, " failed")));
    fake_.Heal();
  }
}

TEST_F(CudaDeviceTest, EveryFailureOfMakingOneSurfaces) {
  Program program = TwoStreams();
  program.streams[0].priority = -1;
  program.streams[1].sm_budget = 32;
  for (const char* call : {"PrimaryContextRetain", "StreamCreate", "GreenStreamCreate", "EventCreate",
                           "GraphClone", "GraphInstantiate", "StreamBeginCapture", "LaunchKernel",
                           "StreamEndCapture", "SplitSms", "GreenContextCreate", "KernelNodeSetAttribute"}) {
    executor_ = nullptr;
    fake_.FailOn(call);
    EXPECT_THAT(Make(program, {.one_graph = false}).message(),
                AllOf(HasSubstr("program 'test'"), HasSubstr(StrCat(call, " failed"))));
    fake_.Heal();
  }
}

TEST_F(CudaDeviceTest, ADeviceErrorShowsAtTheNextCallAndStays) {
  ASSERT_TRUE(Make(TwoStreams()).ok());
  ASSERT_TRUE(Run().ok());
  fake_.FailOn("EventQuery");
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(Run().message(),
                AllOf(HasSubstr("an earlier run failed on the device"),
                      HasSubstr("'input', 'attention', 'ffn', 'output'"), HasSubstr("blocking=True")));
  }
  fake_.FailOn("EventQuery", cuda::kErrorNotReady);
  EXPECT_TRUE(Run().ok()) << "still running is no error";
}

TEST_F(CudaDeviceTest, BlockingNamesTheOperatorOfADeviceError) {
  ASSERT_TRUE(Make(TwoStreams(), {.blocking = true}).ok());
  fake_.FailOn("StreamSynchronize", cuda::FakeDriver::kBroken, /*skip=*/1);
  EXPECT_THAT(Run().message(), HasSubstr("operator 'attention' (command 1): StreamSynchronize failed"));
}

TEST_F(CudaDeviceTest, FallsBackToStreamsWhenAGraphCannotBeAChild) {
  ASSERT_TRUE(Make(TwoStreams()).ok());
  fake_.FailOn("AddChildNode");
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(fake_.TakeLog(), Contains("GraphLaunch exec(g1) s1"));
  EXPECT_THAT(executor_->Mode(), HasSubstr("streams (operator 'attention' (command 1): AddChildNode failed"));
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(fake_.TakeLog(), Not(Contains("GraphCreate")));
}

TEST_F(CudaDeviceTest, StaysUsableWhenTheFallbackFailsToo) {
  ASSERT_TRUE(Make(TwoStreams()).ok());
  fake_.FailOn("GraphInstantiate");
  EXPECT_THAT(Run().message(), HasSubstr("GraphInstantiate failed"));
  fake_.Heal();
  EXPECT_TRUE(Run().ok());
  EXPECT_EQ(executor_->Mode(), "one graph");
}

TEST_F(CudaDeviceTest, WaitsForItsWorkBeforeItGoes) {
  ASSERT_TRUE(Make(TwoStreams()).ok());
  ASSERT_TRUE(Run().ok());
  (void)fake_.TakeLog();
  executor_ = nullptr;
  EXPECT_EQ(fake_.TakeLog().front(), "EventSynchronize e1");
}

TEST_F(CudaDeviceTest, WaitsForItsWorkInItsContext) {
  static cuda::FakeDriver* fake;
  static int pushed;
  fake = &fake_;
  pushed = 0;
  driver_.EventSynchronize = [](cuda::Event) { return pushed = fake->pushed(), cuda::kSuccess; };
  ASSERT_TRUE(Make(TwoStreams()).ok());
  ASSERT_TRUE(Run().ok());
  executor_ = nullptr;
  EXPECT_EQ(pushed, 1);
}

TEST_F(CudaDeviceTest, IsLookedAtWhileItRuns) {
  ASSERT_TRUE(Make(TwoStreams()).ok());
  // The driver takes calls from any thread; what the fake one writes down is this thread's.
  driver_.ContextPush = [](cuda::Context) { return cuda::kSuccess; };
  driver_.ContextPop = [](cuda::Context*) { return cuda::kSuccess; };
  driver_.EventQuery = [](cuda::Event) { return cuda::kSuccess; };
  std::atomic<bool> stop = false;
  std::thread other([&] {
    while (!stop) {
      EXPECT_TRUE(executor_->Idle());
      EXPECT_TRUE(executor_->Failure().ok());
    }
  });
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(Run().ok());
  stop = true;
  other.join();
}

TEST_F(CudaDeviceTest, GivesStreamsTheirPriorities) {
  Program program = TwoStreams();
  program.streams[1].priority = -5;
  ASSERT_TRUE(Make(program, {.one_graph = false}).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(fake_.TakeLog(),
              AllOf(Contains("GraphLaunch exec(g0) s0"), Contains("GraphLaunch exec(g2) s1")))
      << "the kernels of stream 1 are a copy with its priority";
}

TEST_F(CudaDeviceTest, BindsAStreamToSms) {
  Program program = TwoStreams();
  program.streams[0].sm_budget = 100;
  program.streams[1].sm_budget = 32;
  ASSERT_TRUE(Make(program).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(fake_.TakeLog(), AllOf(Contains("AddChildNode g2"), Contains("AddChildNode g3")))
      << "both partitions were captured again, on streams of their green contexts";
}

TEST_F(CudaDeviceTest, SharesOutSms) {
  auto shares = [&](std::vector<unsigned> budgets) {
    (void)fake_.TakeLog();
    auto contexts = cuda::ShareOutSms(driver_, 0, budgets);
    std::vector<std::string> log;
    for (std::string& line : fake_.TakeLog()) {
      if (line.starts_with("GreenContextCreate")) log.push_back(line.substr(19));
    }
    if (!contexts.ok()) log.push_back(contexts.status().message());
    return log;
  };
  EXPECT_THAT(shares({}), IsEmpty());
  EXPECT_THAT(shares({16}), ElementsAre("16sms"));
  EXPECT_THAT(shares({100, 32}), ElementsAre("32sms", "100sms"));
  EXPECT_THAT(shares({10, 120}), ElementsAre("16sms", "116sms"));
  EXPECT_THAT(shares({132}), ElementsAre("132sms"));
  EXPECT_THAT(shares({64, 64}), ElementsAre("64sms", "64sms"));
  EXPECT_THAT(shares({16, 100, 16}), ElementsAre("16sms", "16sms", "100sms"));
  EXPECT_THAT(shares({100, 100}), ElementsAre("104sms", HasSubstr("ask for more")));
  EXPECT_THAT(shares({132, 132}), ElementsAre("132sms", HasSubstr("ask for more than the device's 132 SMs")));
  EXPECT_THAT(shares(std::vector<unsigned>(18, 4)), AllOf(SizeIs(18), Contains(HasSubstr("ask for more"))))
      << "there are 16 pieces of 8 and one of 4: none of no SMs at all, however little it asks for";
  driver_.SplitSms = nullptr;
  EXPECT_THAT(shares({16}), ElementsAre(HasSubstr("12.4 or later")));
}

TEST_F(CudaDeviceTest, CopiesToPeers) {
  const Program program =
      ProgramBuilder(1).Devices(2).Copy(0, "exchange", Memory(0x9000, 64), Memory(0x8000, 64), 1);
  ASSERT_TRUE(Make(program, {.one_graph = false}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(fake_.TakeLog(), Contains("MemcpyPeerAsync 36864 context1 32768 context0 64 s0"));

  ASSERT_TRUE(Make(program, {}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(fake_.TakeLog(), Contains("AddMemcpyNode 36864 32768 64"));
  EXPECT_EQ(executor_->Mode(), "one graph");

  fake_.FailOn("EnablePeerAccess", cuda::kErrorPeerAccessAlreadyEnabled);
  EXPECT_TRUE(Make(program, {}, {0, 1}).ok());
  fake_.FailOn("EnablePeerAccess", cuda::kErrorPeerAccessUnsupported);
  EXPECT_TRUE(Make(program, {}, {0, 1}).ok()) << "the driver copies through the host";
  fake_.FailOn("EnablePeerAccess");
  EXPECT_THAT(Make(program, {}, {0, 1}).message(), HasSubstr("EnablePeerAccess failed"));
}

TEST_F(CudaDeviceTest, CopiesOfRowsThatMoveAreNoNodes) {
  const Range rows = Memory(0x9000, 24);
  const Program moving[] = {
      ProgramBuilder(1).MovingInput(40).CopyRows(0, "in", rows, InputBytes(0, 0, 40), {3, 16, 8}),
      ProgramBuilder(1).Output(40).CopyRows(0, "out", OutputBytes(0, 0, 40), rows, {3, 8, 16}),
  };
  for (const Program& program : moving) {
    ASSERT_TRUE(Make(program).ok());
    for (const uintptr_t address : {0x100, 0x200}) {
      ASSERT_TRUE(Run(address, address).ok());
      EXPECT_THAT(fake_.TakeLog(),
                  AllOf(Contains(StartsWith("Memcpy3DAsync")), Not(Contains(HasSubstr("SetMemcpy")))));
    }
    EXPECT_THAT(executor_->Mode(), HasSubstr("(command 0): the driver gives no new addresses to a copy of"));
  }
  ASSERT_TRUE(Make(ProgramBuilder(1).CopyRows(0, "stays", rows, Memory(0x8000, 40), {3, 16, 8})).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_EQ(executor_->Mode(), "one graph");
}

void* Flag(uintptr_t address) { return reinterpret_cast<void*>(address); }

// Sends to device 1 once there is room, and uses what arrives from it; on two streams.
Program Exchange() {
  return ProgramBuilder(2)
      .Devices(2)
      .Signal(1, "room", Flag(0x7000), 1)
      .Launch(0, "makes", {}, {Memory(0x8000, 64)})
      .Await(0, "room", Flag(0x6000), 1)
      .Copy(0, "send", Memory(0x9000, 64), Memory(0x8000, 64), 1)
      .Signal(0, "sent", Flag(0x7004), 1)
      .Await(1, "receive", Flag(0x6004), 1, {Memory(0xa000, 64)})
      .Launch(1, "takes", {Memory(0xa000, 64)}, {Memory(0xb000, 64)});
}

TEST_F(CudaDeviceTest, SetsAndAwaitsFlagsOnStreams) {
  ASSERT_TRUE(Make(Exchange(), {.one_graph = false}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  auto log = fake_.TakeLog();
  std::erase_if(log, [](const std::string& line) { return line.find("Event") != std::string::npos; });
  EXPECT_THAT(log, ElementsAre("StreamWriteValue s1 28672 1",                                //
                               "GraphLaunch exec(g0) s0",                                    //
                               "StreamWaitValue s0 24576 1", "StreamWriteValue s0 24576 0",  //
                               "MemcpyPeerAsync 36864 context1 32768 context0 64 s0",        //
                               "StreamWriteValue s0 28676 1",                                //
                               "StreamWaitValue s1 24580 1", "StreamWriteValue s1 24580 0",  //
                               "GraphLaunch exec(g1) s1"));
}

std::string Show(const std::vector<cuda::MemOp>& ops) {
  std::string text;
  for (const cuda::MemOp& op : ops) {
    text += StrCat(op.type == cuda::kWaitValue32 ? " wait " : " write ", op.on.address, " ", op.on.value);
    EXPECT_EQ(op.on.flags, 0u);
  }
  return text;
}

TEST_F(CudaDeviceTest, FlagsAreNodesOfTheGraph) {
  ASSERT_TRUE(Make(Exchange(), {}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_EQ(executor_->Mode(), "one graph");
  const auto& n = fake_.NodesOf(fake_.launched());
  ASSERT_EQ(n.size(), 7u) << "neighbours in the list that are on different streams stay apart";
  const auto ops = [&](int i) { return Show(fake_.Node(n[i]).ops); };
  const auto after = [&](int i) { return fake_.Node(n[i]).after; };
  EXPECT_EQ(ops(0), " write 28672 1");
  EXPECT_THAT(after(0), IsEmpty());
  EXPECT_EQ(ops(2), " wait 24576 1 write 24576 0");
  EXPECT_THAT(after(2), ElementsAre(n[1]));
  EXPECT_THAT(after(3), ElementsAre(n[2]));
  EXPECT_EQ(ops(4), " write 28676 1");
  EXPECT_THAT(after(4), ElementsAre(n[3]));
  EXPECT_EQ(ops(5), " wait 24580 1 write 24580 0");
  EXPECT_THAT(after(5), ElementsAre(n[0]));
  EXPECT_THAT(after(6), ElementsAre(n[5]));
}

TEST_F(CudaDeviceTest, ANodeFollowsOnlyWhatNoOtherOneImplies) {
  ProgramBuilder b(3);
  b.Launch(0, "a").Record(0, 0).Wait(1, 0).Launch(1, "b").Record(1, 1).Wait(0, 1).Launch(0, "c");
  b.Record(0, 2).Wait(2, 0).Wait(2, 2).Wait(2, 1).Launch(2, "d").Launch(1, "e");
  b.Record(1, 3).Wait(2, 3).Launch(2, "f");
  ASSERT_TRUE(Make(b).ok());
  ASSERT_TRUE(Run().ok());
  const auto n = fake_.NodesOf(fake_.launched());
  ASSERT_EQ(n.size(), 6u);
  const auto after = [&](size_t node) { return fake_.Node(n[node]).after; };
  EXPECT_THAT(after(0), IsEmpty());
  EXPECT_THAT(after(1), ElementsAre(n[0]));
  EXPECT_THAT(after(2), ElementsAre(n[1])) << "not a, too";
  EXPECT_THAT(after(3), ElementsAre(n[2])) << "which was after a and b";
  EXPECT_THAT(after(4), ElementsAre(n[1]));
  EXPECT_THAT(after(5), ElementsAre(n[3], n[4])) << "of which neither implies the other";
}

TEST_F(CudaDeviceTest, NeighbouringFlagsBecomeOneNode) {
  ProgramBuilder b(2);
  b.Devices(2).Launch(0, "a").Record(0, 0).Wait(1, 0).Launch(0, "beside");
  b.Signal(1, "x", Flag(0x7000), 1).Await(1, "y", Flag(0x6000), 1).Signal(1, "z", Flag(0x7004), 1);
  b.Launch(1, "b").Await(1, "w", Flag(0x6004), 1);
  ASSERT_TRUE(Make(b, {}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  const auto& n = fake_.NodesOf(fake_.launched());
  ASSERT_EQ(n.size(), 5u);
  EXPECT_EQ(Show(fake_.Node(n[2]).ops), " write 28672 1 wait 24576 1 write 24576 0 write 28676 1");
  EXPECT_THAT(fake_.Node(n[2]).after, ElementsAre(n[0]));
  EXPECT_THAT(fake_.Node(n[3]).after, ElementsAre(n[2]));
  EXPECT_THAT(fake_.Node(n[4]).after, ElementsAre(n[3]));
}

TEST_F(CudaDeviceTest, ANodeTakesNoMoreFlagsThanTheDriverAllows) {
  ProgramBuilder b(2);
  b.Launch(1, "a");
  for (int i = 0; i < 200; ++i) b.Await(0, "w", Flag(0x6000 + 4 * i));
  ASSERT_TRUE(Make(b).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(fake_.TakeLog(), AllOf(Contains("AddMemOpNode 256"), Contains("AddMemOpNode 144")));
}

// Flags on stream 1: the first ones between two launches, the last one beside the second.
ProgramBuilder FlagsBetweenLaunches() {
  ProgramBuilder b(2);
  b.Devices(2).Launch(0, "a").Record(0, 0).Wait(1, 0);
  b.Signal(1, "s", Flag(0x7000), 1).Signal(1, "s", Flag(0x7004), 1).Await(1, "t", Flag(0x6000), 1);
  b.Signal(1, "u", Flag(0x7008), 1).Record(1, 1).Wait(0, 1).Launch(0, "b").Signal(1, "v", Flag(0x700c), 1);
  return b;
}

TEST_F(CudaDeviceTest, AKernelSetsAndAwaitsFlagsWhereNothingElseComputes) {
  ASSERT_TRUE(Make(FlagsBetweenLaunches(), {}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  const auto& n = fake_.NodesOf(fake_.launched());
  ASSERT_EQ(n.size(), 4u);
  EXPECT_EQ(fake_.Node(n[1]).does, "set 28672 set 28676 ; wait 24576 ; set 28680 ");
  EXPECT_THAT(fake_.Node(n[1]).after, ElementsAre(n[0]));
  EXPECT_THAT(fake_.Node(n[2]).after, ElementsAre(n[1]));
  EXPECT_EQ(Show(fake_.Node(n[3]).ops), " write 28684 1") << "'b' may want the place of a kernel";

  ProgramBuilder many(1);
  for (int i = 0; i < 70; ++i) many.Await(0, "w", Flag(0x6000 + 4 * i));
  ASSERT_TRUE(Make(many).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_EQ(fake_.NodesOf(fake_.launched()).size(), 3u) << "32 flags a kernel";
}

TEST_F(CudaDeviceTest, TheDriversOperationsServeWhereThereIsNoFlagKernel) {
  const auto served = [&] {
    EXPECT_TRUE(Make(FlagsBetweenLaunches(), {}, {0, 1}).ok());
    EXPECT_TRUE(Run().ok());
    return Show(fake_.Node(fake_.NodesOf(fake_.launched())[1]).ops);
  };
  const std::string expected = " write 28672 1 write 28676 1 wait 24576 1 write 24576 0 write 28680 1";
  fake_.FailOn("ModuleLoad");
  EXPECT_EQ(served(), expected);
  fake_.Heal();
  fake_.FailOn("ModuleGetFunction");
  EXPECT_EQ(served(), expected);
  fake_.Heal();
  driver_.AddKernelNode = nullptr;
  EXPECT_EQ(served(), expected);
}

TEST_F(CudaDeviceTest, StreamsWithABudgetOfSmsAwaitFlagsWithoutAKernel) {
  Program program = FlagsBetweenLaunches();
  program.streams[1].sm_budget = 16;
  ASSERT_TRUE(Make(program, {}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(fake_.TakeLog(), Not(Contains(StartsWith("AddKernelNode"))));
}

const Range kTotal = Memory(0xb000, 64);
const std::vector<Range> kParts = {Memory(0x8000, 64), Memory(0x9000, 64)};
const std::string kAdds = "add 32768 add 36864 into 45056, 64 bytes of float32";

// Adds what this device and another one have made.
ProgramBuilder AllReduce() {
  ProgramBuilder b(2);
  b.Devices(2).Launch(0, "makes", {}, {kParts[0]}).Signal(0, "made", Flag(0x7000), 1);
  b.Await(0, "made", Flag(0x6000), 1, {kParts[1]}).Sum(0, "sum", kTotal, kParts).Launch(0, "takes", {kTotal});
  return b;
}

TEST_F(CudaDeviceTest, ASumAndTheFlagsAheadOfItAreOneNode) {
  ASSERT_TRUE(Make(AllReduce(), {}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_EQ(executor_->Mode(), "one graph");
  const auto& n = fake_.NodesOf(fake_.launched());
  ASSERT_EQ(n.size(), 3u);
  EXPECT_EQ(fake_.Node(n[1]).does, "set 28672 wait 24576 " + kAdds);
  EXPECT_THAT(fake_.Node(n[1]).after, ElementsAre(n[0]));
  EXPECT_THAT(fake_.Node(n[2]).after, ElementsAre(n[1]));
}

TEST_F(CudaDeviceTest, ASumHasBlocksForItsSizeAndTheDevice) {
  const auto blocks = [&](uint64_t bytes) {
    EXPECT_TRUE(Make(ProgramBuilder(1).Sum(0, "sum", Memory(1ull << 32, bytes),
                                           {Memory(1ull << 33, bytes), Memory(1ull << 34, bytes)},
                                           Element::kBFloat16))
                    .ok());
    EXPECT_TRUE(Run().ok());
    const cuda::FakeNode& node = fake_.Node(fake_.NodesOf(fake_.launched())[0]);
    EXPECT_THAT(node.does, HasSubstr(StrCat(", ", bytes, " bytes of bfloat16")));
    return node.grid;
  };
  EXPECT_EQ(blocks(0), 1u);
  EXPECT_EQ(blocks(16 * 512), 1u);
  EXPECT_EQ(blocks(16 * 512 + 16), 2u);
  EXPECT_EQ(blocks(1 << 30), 2 * fake_.sms) << "half of what has a place at once";
}

TEST_F(CudaDeviceTest, ASumIsToldOfItsNorm) {
  const auto does = [&](std::vector<Range> more, Norm norm, Element element) {
    std::vector<Range> reads = kParts;
    reads.insert(reads.end(), more.begin(), more.end());
    const Range normed = Memory(0xc000, 64);
    EXPECT_TRUE(Make(ProgramBuilder(1).SumAndNorm(0, "sum", kTotal, normed, reads, norm, element)).ok());
    EXPECT_TRUE(Run().ok());
    return fake_.Node(fake_.NodesOf(fake_.launched())[0]).does;
  };
  EXPECT_EQ(
      does({}, {.width = 8, .epsilon = 0.5f}, Element::kFloat32),
      kAdds + ", residual 0, weight 0, normed into 49152, rows of 2 pieces, 1/width 0.125, epsilon 0.5");
  EXPECT_EQ(does({Memory(0xd000, 64), Memory(0xe000, 64)},
                 {.width = 16, .residual = true, .weight = Element::kFloat32, .rounds_scale = true},
                 Element::kBFloat16),
            "add 32768 add 36864 into 45056, 64 bytes of bfloat16, residual 53248, weight 57344 wide, normed "
            "into 49152, rows of 2 pieces, 1/width 0.0625, epsilon 0, scale rounded");
  EXPECT_EQ(does({Memory(0xe000, 32)}, {.width = 16, .weight = Element::kBFloat16, .rounds_normed = true},
                 Element::kBFloat16),
            "add 32768 add 36864 into 45056, 64 bytes of bfloat16, residual 0, weight 57344, normed into "
            "49152, rows of 2 pieces, 1/width 0.0625, epsilon 0, normed rounded");
}

TEST_F(CudaDeviceTest, ANormHasABlockForARowAndThreadsForItsPieces) {
  const auto shape = [&](uint32_t rows, uint32_t width) {
    const uint64_t bytes = uint64_t{rows} * width * 2;
    const auto at = [&](int i) { return Memory(uint64_t(i) << 32, bytes); };
    EXPECT_TRUE(Make(ProgramBuilder(1).SumAndNorm(0, "sum", at(1), at(2), {at(3), at(4)}, {.width = width},
                                                  Element::kBFloat16))
                    .ok());
    EXPECT_TRUE(Run().ok());
    const cuda::FakeNode& node = fake_.Node(fake_.NodesOf(fake_.launched())[0]);
    return std::pair(node.grid, node.threads);
  };
  EXPECT_EQ(shape(1, 8), std::pair(1u, 64u)) << "a warp for signals, one for awaits";
  EXPECT_EQ(shape(3, 65 * 8), std::pair(3u, 96u));
  EXPECT_EQ(shape(16, 4096), std::pair(16u, 512u));
  EXPECT_EQ(shape(1 << 14, 16384), std::pair(2 * fake_.sms, 512u));
}

TEST_F(CudaDeviceTest, OnlySignalsAndAwaitsBehindThemArePartOfASum) {
  const auto nodes = [&](const ProgramBuilder& b) {
    EXPECT_TRUE(Make(b, {}, {0, 1}).ok());
    EXPECT_TRUE(Run().ok());
    std::vector<std::string> does;
    for (cuda::GraphNode node : fake_.NodesOf(fake_.launched())) does.push_back(fake_.Node(node).does);
    return does;
  };
  ProgramBuilder mixed(1);
  mixed.Devices(2).Await(0, "a", Flag(0x6000), 1).Signal(0, "b", Flag(0x7000), 1);
  mixed.Await(0, "c", Flag(0x6004), 1).Sum(0, "sum", kTotal, kParts);
  EXPECT_THAT(nodes(mixed), ElementsAre("wait 24576 ", "set 28672 wait 24580 " + kAdds));

  ProgramBuilder signals(1);
  signals.Devices(2).Await(0, "a", Flag(0x6000), 1).Signal(0, "b", Flag(0x7000), 1);
  signals.Sum(0, "sum", kTotal, kParts).Await(0, "c", Flag(0x6004), 1);
  EXPECT_THAT(nodes(signals), ElementsAre("wait 24576 ", "set 28672 " + kAdds, "wait 24580 "));

  ProgramBuilder apart(1);
  apart.Devices(2).Await(0, "a", Flag(0x6000), 1).Record(0, 0).Sum(0, "sum", kTotal, kParts);
  EXPECT_THAT(nodes(apart), ElementsAre("wait 24576 ", kAdds))
      << "whoever waits for the event need not wait for the sum";
}

TEST_F(CudaDeviceTest, ASumTakes32FlagsOfAKind) {
  const auto flags = [&](int signals, int awaits) {
    ProgramBuilder b(1);
    b.Devices(2);
    for (int i = 0; i < signals; ++i) b.Signal(0, "s", Flag(0x7000 + 4 * i), 1);
    for (int i = 0; i < awaits; ++i) b.Await(0, "w", Flag(0x6000 + 4 * i), 1);
    b.Sum(0, "sum", kTotal, kParts);
    EXPECT_TRUE(Make(b, {}, {0, 1}).ok());
    EXPECT_TRUE(Run().ok());
    std::vector<std::pair<int, int>> found;  // signals and awaits of each node
    for (cuda::GraphNode node : fake_.NodesOf(fake_.launched())) {
      std::istringstream words(fake_.Node(node).does);
      auto& [set, wait] = found.emplace_back();
      for (std::string word; words >> word;) {
        set += word == "set";
        wait += word == "wait";
      }
    }
    return found;
  };
  using Nodes = std::vector<std::pair<int, int>>;
  EXPECT_EQ(flags(32, 32), (Nodes{{32, 32}}));
  EXPECT_EQ(flags(33, 32), (Nodes{{1, 0}, {32, 32}}));
  EXPECT_EQ(flags(40, 40), (Nodes{{32, 0}, {8, 8}, {0, 32}})) << "32 flags of the rest, and the rest of it";
}

TEST_F(CudaDeviceTest, ASumBesideWhichSomethingIsComputedAwaitsNothingItself) {
  const auto check = [&](const Program& program) {
    ASSERT_TRUE(Make(program, {}, {0, 1}).ok());
    ASSERT_TRUE(Run().ok());
    const auto& n = fake_.NodesOf(fake_.launched());
    const auto sum =
        std::find_if(n.begin(), n.end(), [&](auto node) { return fake_.Node(node).does == kAdds; });
    ASSERT_NE(sum, n.end());
    ASSERT_THAT(fake_.Node(*sum).after, SizeIs(1));
    EXPECT_EQ(Show(fake_.Node(fake_.Node(*sum).after[0]).ops), " write 28672 1 wait 24576 1 write 24576 0");
  };
  check(AllReduce().Launch(1, "beside"));
  check(AllReduce().Sum(1, "beside", Memory(0xc000, 64), {Memory(0xd000, 64), Memory(0xe000, 64)}));
  Program budget = AllReduce();
  budget.streams[0].sm_budget = 16;
  check(budget);
}

TEST_F(CudaDeviceTest, FlagsBesideASumAreTheDriversOperations) {
  ASSERT_TRUE(Make(AllReduce().Await(1, "beside", Flag(0x6004), 1), {}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  const auto& n = fake_.NodesOf(fake_.launched());
  EXPECT_EQ(Show(fake_.Node(n.back()).ops), " wait 24580 1 write 24580 0");
}

TEST_F(CudaDeviceTest, ASumHasThePriorityOfItsStream) {
  Program program = AllReduce();
  const auto priority = [&] {
    EXPECT_TRUE(Make(program, {}, {0, 1}).ok());
    EXPECT_TRUE(Run().ok());
    return fake_.Node(fake_.NodesOf(fake_.launched())[1]).priority;
  };
  EXPECT_EQ(priority(), 0);
  program.streams[0].priority = -3;
  EXPECT_EQ(priority(), -3);
}

TEST_F(CudaDeviceTest, AddsOnStreams) {
  ASSERT_TRUE(Make(AllReduce(), {.one_graph = false}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  auto log = fake_.TakeLog();
  std::erase_if(log, [](const std::string& line) { return line.find("Event") != std::string::npos; });
  EXPECT_THAT(log, ElementsAre("GraphLaunch exec(g0) s0", "StreamWriteValue s0 28672 1",     //
                               "StreamWaitValue s0 24576 1", "StreamWriteValue s0 24576 0",  //
                               "LaunchKernel 1 s0 " + kAdds, "GraphLaunch exec(g1) s0"));

  ASSERT_TRUE(Make(AllReduce(), {.blocking = true}, {0, 1}).ok());
  fake_.FailOn("StreamSynchronize", cuda::FakeDriver::kBroken, /*skip=*/3);
  EXPECT_THAT(Run().message(), HasSubstr("operator 'sum' (command 3): StreamSynchronize failed"));
  EXPECT_THAT(fake_.TakeLog(), Contains(HasSubstr(kAdds)));
}

TEST_F(CudaDeviceTest, AFailedSumNamesItsOperator) {
  ASSERT_TRUE(Make(AllReduce(), {.one_graph = false}, {0, 1}).ok());
  fake_.FailOn("LaunchKernel");
  EXPECT_THAT(Run().message(), HasSubstr("operator 'sum' (command 3): LaunchKernel failed"));
  fake_.Heal();
  Program program = AllReduce();
  program.streams[0].priority = -1;
  for (const char* call : {"AddKernelNode", "KernelNodeSetAttribute"}) {
    ASSERT_TRUE(Make(program, {}, {0, 1}).ok());
    fake_.FailOn(call);
    ASSERT_TRUE(Run().ok());
    EXPECT_THAT(executor_->Mode(),
                AllOf(HasSubstr("operator 'made' (command 1)"), HasSubstr(StrCat(call, " failed"))));
    EXPECT_THAT(fake_.TakeLog(), Contains(HasSubstr(kAdds))) << "command by command it can be done";
    fake_.Heal();
  }
}

TEST_F(CudaDeviceTest, ASumWantsItsKernel) {
  for (bool one_graph : {false, true}) {
    for (const char* call : {"ModuleLoad", "ModuleGetFunction"}) {
      executor_ = nullptr;
      fake_.FailOn(call);
      EXPECT_THAT(Make(AllReduce(), {.one_graph = one_graph}, {0, 1}).message(),
                  AllOf(StartsWith("program 'test': "), HasSubstr(StrCat(call, " failed"))));
      fake_.Heal();
    }
  }
  driver_.AddKernelNode = nullptr;
  EXPECT_THAT(Make(AllReduce(), {}, {0, 1}).message(),
              HasSubstr("operator 'sum' (command 3) needs cuGraphAddKernelNode_v2"));
}

TEST_F(CudaDeviceTest, KernelsAreLoadedBeforeTheFirstRun) {
  for (const ProgramBuilder& b : {AllReduce(), FlagsBetweenLaunches()}) {
    ASSERT_TRUE(Make(b, {}, {0, 1}).ok());
    ASSERT_TRUE(Run().ok());
    EXPECT_THAT(fake_.TakeLog(), Not(Contains(StartsWith("Module"))));
  }
}

TEST_F(CudaDeviceTest, ASumReachesTheMemoryOfAllDevices) {
  const Program program = ProgramBuilder(1)
                              .Devices(3)
                              .Await(0, "made", Flag(0x6000), 2, {kParts[1]})
                              .Sum(0, "sum", kTotal, kParts);
  for (int skip : {0, 1}) {
    fake_.FailOn("EnablePeerAccess", cuda::FakeDriver::kBroken, skip);
    EXPECT_THAT(Make(program, {}, {0, 1, 2}).message(), HasSubstr("EnablePeerAccess failed"));
  }
  fake_.FailOn("EnablePeerAccess", cuda::kErrorPeerAccessUnsupported);
  EXPECT_TRUE(Make(program, {}, {0, 1, 2}).ok()) << "it may add what is in this device's memory";
}

TEST_F(CudaDeviceTest, FallsBackToStreamsWithFlags) {
  for (const char* call : {"AddMemOpNode", "AddChildNode"}) {
    ASSERT_TRUE(Make(Exchange(), {}, {0, 1}).ok());
    fake_.FailOn(call);
    ASSERT_TRUE(Run().ok());
    const auto log = fake_.TakeLog();
    EXPECT_EQ(std::count_if(log.begin(), log.end(),
                            [](const std::string& line) { return line.starts_with("StreamWriteValue"); }),
              4)
        << call;
    EXPECT_THAT(executor_->Mode(),
                AllOf(StartsWith("streams (operator '"), HasSubstr(StrCat(call, " failed"))));
    fake_.Heal();
  }
}

TEST_F(CudaDeviceTest, AFailedFlagNamesItsOperator) {
  for (const auto& [call, skip, names] : {std::tuple{"StreamWriteValue", 1, "'room' (command 2)"},
                                          {"StreamWaitValue", 1, "'receive' (command 5)"}}) {
    ASSERT_TRUE(Make(Exchange(), {.one_graph = false}, {0, 1}).ok());
    fake_.FailOn(call, cuda::FakeDriver::kBroken, skip);
    EXPECT_THAT(Run().message(), AllOf(HasSubstr(names), HasSubstr(StrCat(call, " failed"))));
    fake_.Heal();
  }
}

TEST_F(CudaDeviceTest, IsReleasedFromAStreamOfItsOwn) {
  ASSERT_TRUE(Make(Exchange(), {}, {0, 1}).ok());
  EXPECT_TRUE(executor_->Idle());
  fake_.FailOn("GraphLaunch");
  EXPECT_FALSE(Run().ok());
  fake_.Heal();
  (void)fake_.TakeLog();
  executor_->Release();
  EXPECT_THAT(fake_.TakeLog(), ElementsAre("StreamWriteValue s2 24576 1", "StreamWriteValue s2 24580 1"));
  fake_.FailOn("EventQuery", cuda::kErrorNotReady);
  EXPECT_FALSE(executor_->Idle());
  fake_.FailOn("EventQuery");
  EXPECT_TRUE(executor_->Idle()) << "what has failed is over";
  EXPECT_THAT(executor_->Failure().message(),
              AllOf(HasSubstr("an earlier run failed on the device"), HasSubstr("EventQuery failed")));
  fake_.Heal();
  EXPECT_TRUE(executor_->Failure().ok());
}

TEST_F(CudaDeviceTest, WantsToReachTheMemoryOfWhomItSignals) {
  fake_.FailOn("EnablePeerAccess", cuda::kErrorPeerAccessUnsupported);
  EXPECT_THAT(Make(Exchange(), {}, {0, 1}).message(),
              AllOf(HasSubstr("operator 'room' (command 0): device 0 cannot reach the memory of device 1"),
                    HasSubstr("EnablePeerAccess failed")));
}

TEST_F(CudaDeviceTest, ReachesADeviceOfAnotherProcessByItsAddress) {
  fake_.FailOn("EnablePeerAccess");
  ASSERT_TRUE(Make(Exchange(), {.one_graph = false}, {0, CudaDevice::kElsewhere}).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(fake_.TakeLog(),
              AllOf(Contains("MemcpyAsync 36864 32768 64 s0"), Contains("StreamWriteValue s0 28676 1")));
  ASSERT_TRUE(Make(Exchange(), {}, {0, CudaDevice::kElsewhere}).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_EQ(executor_->Mode(), "one graph");
}

TEST_F(CudaDeviceTest, NamesWhatAnOldDriverLacksForFlags) {
  driver_.AddMemOpNode = nullptr;
  EXPECT_THAT(Make(Exchange(), {}, {0, 1}).message(),
              HasSubstr("operator 'room' (command 0) needs cuGraphAddBatchMemOpNode"));
  driver_.StreamWaitValue = nullptr;
  EXPECT_THAT(Make(Exchange(), {}, {0, 1}).message(), HasSubstr("needs cuStreamWaitValue32_v2"));
  EXPECT_TRUE(Make(TwoStreams()).ok()) << "a program without flags needs none of it";
}

TEST_F(CudaDeviceTest, SynchronizesAStreamOfAnyDevice) {
  ASSERT_TRUE(cuda::Synchronize(driver_, xla_).ok());
  EXPECT_THAT(fake_.TakeLog(), ElementsAre("StreamSynchronize xla"));
  fake_.FailOn("StreamSynchronize");
  EXPECT_THAT(cuda::Synchronize(driver_, xla_).message(), HasSubstr("StreamSynchronize failed"));
}

// Each command with its begin and end, in microseconds.
std::vector<std::string> Shown(const Executor& executor, const Result<std::vector<CommandTime>>& times) {
  if (!times.ok()) return {times.status().message()};
  std::vector<std::string> lines;
  for (const CommandTime& t : times.value()) {
    const std::string& name = executor.program().commands[t.command].name;
    lines.push_back(StrCat(name, " ", std::lround(t.begin_us), "-", std::lround(t.end_us)));
  }
  return lines;
}

TEST_F(CudaDeviceTest, TakesTimesInOneGraph) {
  ASSERT_TRUE(Make(TwoStreams(), {.timed = true}).ok());
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(Run().ok());
    EXPECT_THAT(Shown(*executor_, executor_->Times()),
                ElementsAre("input 0-1", "attention 1-2", "ffn 2-3", "output 3-4"));
  }
  EXPECT_EQ(executor_->Mode(), "one graph");
  const auto& n = fake_.NodesOf(fake_.launched());
  std::vector<int> types;
  for (cuda::GraphNode node : n) types.push_back(fake_.Node(node).type);
  using namespace cuda;
  EXPECT_THAT(types, ElementsAre(kNodeEventRecord, kNodeMemcpy, kNodeEventRecord, kNodeGraph,
                                 kNodeEventRecord, kNodeEventRecord, kNodeGraph, kNodeEventRecord,
                                 kNodeEventRecord, kNodeMemcpy, kNodeEventRecord))
      << "what follows the command before it on its stream, and nothing else, begins when that ends";
  EXPECT_THAT(fake_.Node(n[1]).after, ElementsAre(n[0]));
  EXPECT_THAT(fake_.Node(n[3]).after, ElementsAre(n[2]));
  EXPECT_THAT(fake_.Node(n[5]).after, ElementsAre(n[0], n[4])) << "ffn waits for attention";
  EXPECT_THAT(fake_.Node(n[8]).after, ElementsAre(n[7])) << "output waits for both";
}

TEST_F(CudaDeviceTest, TakesTimesOnStreams) {
  for (const CudaOptions& options :
       {CudaOptions{.one_graph = false, .timed = true}, {.blocking = true, .timed = true}}) {
    ASSERT_TRUE(Make(TwoStreams(), options).ok());
    ASSERT_TRUE(Run().ok());
    (void)fake_.TakeLog();
    EXPECT_THAT(Shown(*executor_, executor_->Times()),
                ElementsAre("input 0-1", "attention 1-2", "ffn 2-3", "output 3-4"));
    EXPECT_THAT(fake_.TakeLog()[0], StartsWith("EventSynchronize")) << "waits for the run";
  }
}

TEST_F(CudaDeviceTest, TakesTimesWhenItFallsBackToStreams) {
  ASSERT_TRUE(Make(TwoStreams(), {.timed = true}).ok());
  fake_.FailOn("AddChildNode");
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(Shown(*executor_, executor_->Times()),
              ElementsAre("input 0-1", "attention 1-2", "ffn 2-3", "output 3-4"));
}

TEST_F(CudaDeviceTest, FlagsOfOneNodeHaveOneTime) {
  ProgramBuilder b(1);
  b.Devices(2).Launch(0, "a").Signal(0, "x", Flag(0x7000), 1).Await(0, "y", Flag(0x6000), 1).Launch(0, "b");
  b.Copy(0, "empty", Memory(0x9000, 0), Memory(0x8000, 0));
  ASSERT_TRUE(Make(b, {.timed = true}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(Shown(*executor_, executor_->Times()), ElementsAre("a 0-1", "x 1-2", "y 1-2", "b 2-3"));
  EXPECT_EQ(fake_.NodesOf(fake_.launched()).size(), 7u);
  ASSERT_TRUE(Make(b, {.one_graph = false, .timed = true}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(Shown(*executor_, executor_->Times()), ElementsAre("a 0-1", "x 1-2", "y 2-4", "b 4-5"));
}

TEST_F(CudaDeviceTest, ASumSharesItsTimeWithItsFlags) {
  ASSERT_TRUE(Make(AllReduce(), {.timed = true}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(Shown(*executor_, executor_->Times()),
              ElementsAre("makes 0-1", "made 1-2", "made 1-2", "sum 1-2", "takes 2-3"));
  ASSERT_TRUE(Make(AllReduce().Launch(1, "beside"), {.timed = true}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(Shown(*executor_, executor_->Times()),
              ElementsAre("makes 0-1", "made 1-2", "made 1-2", "sum 2-3", "takes 3-4", "beside 0-5"));
  ASSERT_TRUE(Make(AllReduce(), {.one_graph = false, .timed = true}, {0, 1}).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(Shown(*executor_, executor_->Times()),
              ElementsAre("makes 0-1", "made 1-2", "made 2-4", "sum 4-5", "takes 5-6"));
}

TEST_F(CudaDeviceTest, SaysWhyThereAreNoTimes) {
  ASSERT_TRUE(Make(TwoStreams()).ok());
  ASSERT_TRUE(Run().ok());
  EXPECT_EQ(executor_->Times().status().message(), "program 'test' was not added with timed=True");
  ASSERT_TRUE(Make(TwoStreams(), {.timed = true}).ok());
  EXPECT_EQ(executor_->Times().status().message(), "program 'test' has not run yet");
  fake_.FailOn("GraphLaunch");
  EXPECT_FALSE(Run().ok());
  EXPECT_EQ(executor_->Times().status().message(), "program 'test': the last run failed");
  fake_.Heal();
  ASSERT_TRUE(Run().ok());
  for (const char* call : {"EventSynchronize", "EventElapsedTime"}) {
    fake_.FailOn(call);
    EXPECT_THAT(executor_->Times().status().message(),
                AllOf(StartsWith("program 'test': "), HasSubstr(StrCat(call, " failed"))));
    fake_.Heal();
  }
  EXPECT_TRUE(executor_->Times().ok());
}

TEST_F(CudaDeviceTest, EveryFailureOfTakingTimesSurfaces) {
  fake_.FailOn("EventCreate", cuda::FakeDriver::kBroken, /*skip=*/4);
  EXPECT_THAT(Make(TwoStreams(), {.timed = true}).message(), HasSubstr("EventCreate failed"));
  fake_.Heal();
  for (int skip = 0; skip < 10; ++skip) {
    ASSERT_TRUE(Make(TwoStreams(), {.one_graph = false, .timed = true}).ok());
    fake_.FailOn("EventRecord", cuda::FakeDriver::kBroken, skip);
    EXPECT_THAT(Run().message(), HasSubstr("EventRecord failed")) << skip;
    fake_.Heal();
  }
  ASSERT_TRUE(Make(TwoStreams(), {.timed = true}).ok());
  fake_.FailOn("AddEventRecordNode", cuda::FakeDriver::kBroken, /*skip=*/2);
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(executor_->Mode(), HasSubstr("operator 'attention' (command 1): AddEventRecordNode failed"));
}

TEST_F(CudaDeviceTest, SkipsEmptyCopies) {
  for (bool one_graph : {false, true}) {
    ASSERT_TRUE(Make(ProgramBuilder(1).Copy(0, "empty", Memory(0x9000, 0), Memory(0x8000, 0)),
                     {.one_graph = one_graph})
                    .ok());
    ASSERT_TRUE(Run().ok());
    EXPECT_THAT(fake_.TakeLog(), Not(Contains(HasSubstr("emcpy"))));
  }
}

TEST_F(CudaDeviceTest, ChecksWhatItIsMadeOf) {
  EXPECT_THAT(Make(TwoStreams(), {}, {0, 1}).message(), HasSubstr("spans 1 devices, but 2 were given"));
  EXPECT_THAT(CudaDevice::Create(driver_, {0}, TwoStreams(), {}, {}).status().message(),
              HasSubstr("has 2 partitions, but 0 captures"));
  Program program = TwoStreams();
  program.num_devices = 2;
  program.streams[1].device = 1;
  EXPECT_THAT(Make(program, {}, {0, 1}).message(), HasSubstr("stream 1 is on another device"));
}

}  // namespace
}  // namespace dynaflow
