#include "xla_ffi/capture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "xla_ffi/cuda_graph.h"
#include "xla_ffi/tests/fake_driver.h"

namespace dynaflow {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace cuda;  // NOLINT: the test is about it

void* At(uintptr_t address) { return reinterpret_cast<void*>(address); }

class CaptureTest : public testing::Test {
 protected:
  void TearDown() override {
    captures_.Clear();
    EXPECT_EQ(fake_.live(), 0) << "leaked handles";
  }

  Status Begin(int64_t id, std::vector<void*> inputs = {}) {
    DYNAFLOW_RETURN_IF_ERROR(captures_.Expect(id));
    return captures_.Begin(driver_, stream_, inputs);
  }
  Status End(std::vector<void*> outputs = {}) { return captures_.End(driver_, stream_, outputs); }

  FakeDriver fake_;
  const Driver& driver_ = fake_.driver();
  const cuda::Stream stream_ = fake_.NewStream("xla");
  Captures captures_;
};

TEST_F(CaptureTest, KeepsTheGraphAndTheAddresses) {
  ASSERT_TRUE(Begin(7, {At(0x10), At(0x20)}).ok());
  LaunchConfig kernel{.grid_x = 5, .stream = stream_};
  driver_.LaunchKernel(&kernel, nullptr, nullptr, nullptr);
  ASSERT_TRUE(End({At(0x30)}).ok());
  auto found = captures_.Find(7);
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_THAT((*found)->inputs, ElementsAre(0x10, 0x20));
  EXPECT_THAT((*found)->outputs, ElementsAre(0x30));
  auto nodes = ListNodes(driver_, (*found)->graph.get());
  ASSERT_TRUE(nodes.ok());
  ASSERT_EQ(nodes->size(), 1u);
  EXPECT_STREQ(nodes->at(0).type, "kernel");
  EXPECT_EQ(nodes->at(0).kernel, "gemm");
  EXPECT_EQ(nodes->at(0).grid[0], 5u);
}

TEST_F(CaptureTest, RefusesTheWrongMoment) {
  EXPECT_THAT(End().message(), HasSubstr("was not begun"));
  EXPECT_THAT(captures_.Begin(driver_, stream_, {}).message(), HasSubstr("nobody expects"));
  ASSERT_TRUE(Begin(1).ok());
  EXPECT_THAT(Begin(1).message(), HasSubstr("capture 1 exists already"));
  EXPECT_THAT(captures_.Find(1).status().message(), HasSubstr("capture 1 is not finished"));
  EXPECT_THAT(captures_.End(driver_, fake_.NewStream("other"), {}).message(), HasSubstr("on this stream"));
  ASSERT_TRUE(End().ok());
  EXPECT_THAT(End().message(), HasSubstr("was not begun"));
  EXPECT_THAT(captures_.Find(2).status().message(), HasSubstr("no capture 2"));
}

TEST_F(CaptureTest, FreeingAnOpenCaptureGivesTheStreamBack) {
  ASSERT_TRUE(Begin(1).ok());
  ASSERT_TRUE(captures_.Free(1).ok());
  ASSERT_TRUE(Begin(2).ok()) << "the stream still captures";
  ASSERT_TRUE(End().ok());
  EXPECT_THAT(captures_.Free(1).message(), HasSubstr("no capture 1"));
}

TEST_F(CaptureTest, WhatIsExpectedMayBeCalledOff) {
  ASSERT_TRUE(captures_.Expect(1).ok());
  ASSERT_TRUE(captures_.Free(1).ok());
  EXPECT_THAT(captures_.Begin(driver_, stream_, {}).message(), HasSubstr("nobody expects"));
}

TEST_F(CaptureTest, AFailureNamesTheCapture) {
  fake_.FailOn("StreamBeginCapture");
  EXPECT_THAT(Begin(3).message(), HasSubstr("capture 3: StreamBeginCapture failed: CUDA_ERROR_FAKE (700"));
  fake_.Heal();
  ASSERT_TRUE(Begin(3).ok());
  fake_.FailOn("StreamEndCapture");
  EXPECT_THAT(End().message(), HasSubstr("capture 3: StreamEndCapture failed"));
  EXPECT_EQ(captures_.Find(3).status().code(), Code::kNotFound);
}

TEST_F(CaptureTest, RecapturesKernelsMemsetsCopiesAndChildren) {
  const OwnedGraph child = fake_.NewGraph({{.grid = 3}});
  const OwnedGraph graph = fake_.NewGraph({{.type = kNodeMemset, .memset = {0x100, 0, 7, 4, 10, 1}},
                                           {.grid = 5, .cluster = 2},
                                           {.type = kNodeEmpty},
                                           {.type = kNodeGraph, .child = child.get()},
                                           {.type = kNodeMemcpy, .copy = {.width = 12}}});
  (void)fake_.TakeLog();
  auto copy = RecaptureOn(driver_, graph.get(), stream_);
  ASSERT_TRUE(copy.ok()) << copy.status().message();
  EXPECT_THAT(fake_.TakeLog(),
              ElementsAre("StreamBeginCapture xla", "MemsetD2D32Async xla", "LaunchKernel 5 xla",
                          "LaunchKernel 3 xla", "Memcpy3DAsync xla", "StreamEndCapture xla"));
  const auto& nodes = fake_.NodesOf(copy->get());
  ASSERT_EQ(nodes.size(), 4u);
  EXPECT_EQ(fake_.Node(nodes[0]).memset.pitch, 40u) << "a flat memset has no pitch; the 2-D call needs one";
  EXPECT_EQ(fake_.Node(nodes[0]).memset.value, 7u);
  EXPECT_EQ(fake_.Node(nodes[1]).cluster, 2u);
  EXPECT_EQ(fake_.Node(nodes[3]).copy.width, 12u);
}

TEST_F(CaptureTest, RecapturesInTheOrderOfDependencies) {
  const OwnedGraph graph = fake_.NewGraph({{.grid = 1}, {.grid = 2}, {.grid = 3}});
  // Turn the chain round: node 0 now depends on 1, and 1 on 2.
  const auto nodes = fake_.NodesOf(graph.get());
  fake_.Node(nodes[0]).after = {nodes[1]};
  fake_.Node(nodes[1]).after = {nodes[2]};
  fake_.Node(nodes[2]).after = {};
  auto copy = RecaptureOn(driver_, graph.get(), stream_);
  ASSERT_TRUE(copy.ok());
  EXPECT_THAT(fake_.TakeLog(),
              ElementsAre("StreamBeginCapture xla", "LaunchKernel 3 xla", "LaunchKernel 2 xla",
                          "LaunchKernel 1 xla", "StreamEndCapture xla"));
}

TEST_F(CaptureTest, RefusesToRecaptureWhatItCannot) {
  const OwnedGraph graph = fake_.NewGraph({{.type = kNodeHost}});
  EXPECT_THAT(RecaptureOn(driver_, graph.get(), stream_).status().message(),
              HasSubstr("a node of type 'host' cannot be bound to SMs"));
  ASSERT_TRUE(Begin(1).ok()) << "the stream still captures";
}

TEST_F(CaptureTest, SetsThePriorityOfACopy) {
  const OwnedGraph graph = fake_.NewGraph({{.grid = 1}, {.type = kNodeMemset}, {.grid = 2}});
  auto copy = WithPriority(driver_, graph.get(), -3);
  ASSERT_TRUE(copy.ok());
  const auto& nodes = fake_.NodesOf(copy->get());
  EXPECT_EQ(fake_.Node(nodes[0]).priority, -3);
  EXPECT_EQ(fake_.Node(nodes[2]).priority, -3);
  EXPECT_EQ(fake_.Node(fake_.NodesOf(graph.get())[0]).priority, 0);
}

}  // namespace
}  // namespace dynaflow
