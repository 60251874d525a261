#include "xla_ffi/cuda_ipc.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string_view>

#include "xla_ffi/tests/fake_driver.h"

namespace dynaflow::cuda {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

std::string_view Bytes(const IpcHandle& handle) { return {handle.reserved, sizeof(handle.reserved)}; }

TEST(CudaIpc, SharesZeroedMemory) {
  FakeDriver fake;
  auto block = AllocateShared(fake.driver(), 0, 4096);
  ASSERT_TRUE(block.ok()) << block.status().message();
  const auto log = fake.TakeLog();
  EXPECT_THAT(log, Contains("MemAlloc 4096"));
  EXPECT_THAT(log, Contains(testing::StartsWith("MemsetD2D8Async")));
  EXPECT_THAT(log, Contains(testing::StartsWith("StreamSynchronize")));
  auto opened = OpenShared(fake.driver(), 1, Bytes(block->handle));
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_EQ(*opened, block->address + 1);
  EXPECT_EQ(fake.live(), 1) << "the memory alone";
  EXPECT_EQ(fake.pushed(), 0);
}

TEST(CudaIpc, WhatCannotBeSharedIsGivenBack) {
  for (const char* call : {"MemAlloc", "IpcGetMemHandle", "StreamCreate", "StreamSynchronize"}) {
    FakeDriver fake;
    fake.FailOn(call);
    EXPECT_THAT(AllocateShared(fake.driver(), 0, 4096).status().message(), HasSubstr(call));
    EXPECT_EQ(fake.live(), 0) << call;
    EXPECT_EQ(fake.pushed(), 0) << call;
  }
}

TEST(CudaIpc, SaysWhyAnothersMemoryCannotBeOpened) {
  FakeDriver fake;
  EXPECT_THAT(OpenShared(fake.driver(), 0, "short").status().message(), HasSubstr("has 64 bytes, not 5"));
  fake.FailOn("IpcOpenMemHandle", kErrorPeerAccessUnsupported);
  EXPECT_THAT(OpenShared(fake.driver(), 0, Bytes(IpcHandle{})).status().message(),
              HasSubstr("IpcOpenMemHandle failed"));
  EXPECT_EQ(fake.live(), 0);
}

}  // namespace
}  // namespace dynaflow::cuda
