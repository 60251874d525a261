// Our declarations of the driver against NVIDIA's. Ours come first: cuda.h renames functions by macros.
#include <cuda.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string_view>
#include <type_traits>

#include "xla_ffi/cuda_driver.h"

namespace dynaflow::cuda {
namespace {

#define SAME_TYPE(ours, theirs) static_assert(std::is_same_v<ours, theirs>)
SAME_TYPE(Context, CUcontext);
SAME_TYPE(Event, CUevent);
SAME_TYPE(Function, CUfunction);
SAME_TYPE(Graph, CUgraph);
SAME_TYPE(GraphExec, CUgraphExec);
SAME_TYPE(GraphNode, CUgraphNode);
SAME_TYPE(GreenContext, CUgreenCtx);
SAME_TYPE(ResourceDesc, CUdevResourceDesc);
SAME_TYPE(Kernel, CUkernel);
SAME_TYPE(Module, CUmodule);
SAME_TYPE(Stream, CUstream);
SAME_TYPE(Device, CUdevice);
SAME_TYPE(DevicePtr, CUdeviceptr);

#define SAME_VALUE(ours, theirs) static_assert(static_cast<long>(ours) == static_cast<long>(theirs))
SAME_VALUE(kSuccess, CUDA_SUCCESS);
SAME_VALUE(kErrorNotReady, CUDA_ERROR_NOT_READY);
SAME_VALUE(kErrorPeerAccessUnsupported, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
SAME_VALUE(kErrorPeerAccessAlreadyEnabled, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
SAME_VALUE(kIpcLazyEnablePeerAccess, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
SAME_VALUE(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
SAME_VALUE(kEventDefault, CU_EVENT_DEFAULT);
SAME_VALUE(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
SAME_VALUE(kCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME_VALUE(kAttributeSmCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME_VALUE(kAttributeMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME_VALUE(kMemoryDevice, CU_MEMORYTYPE_DEVICE);
SAME_VALUE(kResourceSm, CU_DEV_RESOURCE_TYPE_SM);
SAME_VALUE(kGreenDefaultStream, CU_GREEN_CTX_DEFAULT_STREAM);
SAME_VALUE(kWaitValue32, CU_STREAM_MEM_OP_WAIT_VALUE_32);
SAME_VALUE(kWriteValue32, CU_STREAM_MEM_OP_WRITE_VALUE_32);
SAME_VALUE(kWaitValueGeq, CU_STREAM_WAIT_VALUE_GEQ);
SAME_VALUE(kNodeKernel, CU_GRAPH_NODE_TYPE_KERNEL);
SAME_VALUE(kNodeMemcpy, CU_GRAPH_NODE_TYPE_MEMCPY);
SAME_VALUE(kNodeMemset, CU_GRAPH_NODE_TYPE_MEMSET);
SAME_VALUE(kNodeHost, CU_GRAPH_NODE_TYPE_HOST);
SAME_VALUE(kNodeGraph, CU_GRAPH_NODE_TYPE_GRAPH);
SAME_VALUE(kNodeEmpty, CU_GRAPH_NODE_TYPE_EMPTY);
SAME_VALUE(kNodeEventRecord, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
SAME_VALUE(kNodeMemAlloc, CU_GRAPH_NODE_TYPE_MEM_ALLOC);
SAME_VALUE(kNodeMemFree, CU_GRAPH_NODE_TYPE_MEM_FREE);
SAME_VALUE(kNodeBatchMemOp, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP);
SAME_VALUE(kNodeConditional, CU_GRAPH_NODE_TYPE_CONDITIONAL);
SAME_VALUE(kAttributeCooperative, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
SAME_VALUE(kAttributeClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME_VALUE(kAttributeClusterPolicy, CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE);
SAME_VALUE(kAttributePriority, CU_LAUNCH_ATTRIBUTE_PRIORITY);

#define SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs))
#define SAME_PLACE(ours, field, theirs, their_field) \
  static_assert(offsetof(ours, field) == offsetof(theirs, their_field))
SAME_SIZE(LaunchAttributeValue, CUlaunchAttributeValue);
SAME_PLACE(LaunchAttributeValue, cluster, CUlaunchAttributeValue, clusterDim);
SAME_PLACE(LaunchAttributeValue, priority, CUlaunchAttributeValue, priority);
SAME_SIZE(LaunchAttribute, CUlaunchAttribute);
SAME_PLACE(LaunchAttribute, value, CUlaunchAttribute, value);
SAME_SIZE(MemOp, CUstreamBatchMemOpParams);
SAME_PLACE(MemOp, type, CUstreamBatchMemOpParams, operation);
SAME_PLACE(MemOp, on.type, CUstreamBatchMemOpParams, waitValue.operation);
SAME_PLACE(MemOp, on.address, CUstreamBatchMemOpParams, waitValue.address);
SAME_PLACE(MemOp, on.value, CUstreamBatchMemOpParams, waitValue.value);
SAME_PLACE(MemOp, on.flags, CUstreamBatchMemOpParams, waitValue.flags);
SAME_PLACE(MemOp, on.address, CUstreamBatchMemOpParams, writeValue.address);
SAME_PLACE(MemOp, on.value, CUstreamBatchMemOpParams, writeValue.value);
SAME_PLACE(MemOp, on.flags, CUstreamBatchMemOpParams, writeValue.flags);
SAME_SIZE(MemOpNodeParams, CUDA_BATCH_MEM_OP_NODE_PARAMS);
SAME_PLACE(MemOpNodeParams, context, CUDA_BATCH_MEM_OP_NODE_PARAMS, ctx);
SAME_PLACE(MemOpNodeParams, count, CUDA_BATCH_MEM_OP_NODE_PARAMS, count);
SAME_PLACE(MemOpNodeParams, ops, CUDA_BATCH_MEM_OP_NODE_PARAMS, paramArray);
SAME_PLACE(MemOpNodeParams, flags, CUDA_BATCH_MEM_OP_NODE_PARAMS, flags);
SAME_SIZE(LaunchConfig, CUlaunchConfig);
SAME_PLACE(LaunchConfig, shared_bytes, CUlaunchConfig, sharedMemBytes);
SAME_PLACE(LaunchConfig, stream, CUlaunchConfig, hStream);
SAME_PLACE(LaunchConfig, attributes, CUlaunchConfig, attrs);
SAME_PLACE(LaunchConfig, num_attributes, CUlaunchConfig, numAttrs);
SAME_SIZE(KernelNodeParams, CUDA_KERNEL_NODE_PARAMS);
SAME_PLACE(KernelNodeParams, grid_x, CUDA_KERNEL_NODE_PARAMS, gridDimX);
SAME_PLACE(KernelNodeParams, params, CUDA_KERNEL_NODE_PARAMS, kernelParams);
SAME_PLACE(KernelNodeParams, kernel, CUDA_KERNEL_NODE_PARAMS, kern);
SAME_PLACE(KernelNodeParams, context, CUDA_KERNEL_NODE_PARAMS, ctx);
SAME_SIZE(MemsetNodeParams, CUDA_MEMSET_NODE_PARAMS);
SAME_PLACE(MemsetNodeParams, element_bytes, CUDA_MEMSET_NODE_PARAMS, elementSize);
SAME_PLACE(MemsetNodeParams, width, CUDA_MEMSET_NODE_PARAMS, width);
SAME_SIZE(Memcpy3D, CUDA_MEMCPY3D);
SAME_PLACE(Memcpy3D, src_device, CUDA_MEMCPY3D, srcDevice);
SAME_PLACE(Memcpy3D, dst_type, CUDA_MEMCPY3D, dstMemoryType);
SAME_PLACE(Memcpy3D, dst_device, CUDA_MEMCPY3D, dstDevice);
SAME_PLACE(Memcpy3D, width, CUDA_MEMCPY3D, WidthInBytes);
SAME_PLACE(Memcpy3D, depth, CUDA_MEMCPY3D, Depth);
SAME_SIZE(IpcHandle, CUipcMemHandle);
static_assert(sizeof(Resource) >= sizeof(CUdevResource));
SAME_PLACE(Resource, sm_count, CUdevResource, sm.smCount);

// The functions whose names cuda.h maps to a version: the version that we look up is the one declared.
#define CALLED_AS(ours, theirs)                                                                             \
  static_assert(std::is_invocable_r_v<int, decltype(Driver::ours), Stream, DevicePtr, uint32_t, unsigned>); \
  static_assert(std::is_invocable_r_v<CUresult, decltype(theirs), Stream, DevicePtr, uint32_t, unsigned>)
CALLED_AS(StreamWriteValue, cuStreamWriteValue32);
CALLED_AS(StreamWaitValue, cuStreamWaitValue32);
#define DYNAFLOW_TEXT_(x) #x
#define DYNAFLOW_TEXT(x) DYNAFLOW_TEXT_(x)
static_assert(std::string_view(DYNAFLOW_TEXT(cuStreamWriteValue32)) == "cuStreamWriteValue32_v2");
static_assert(std::string_view(DYNAFLOW_TEXT(cuStreamWaitValue32)) == "cuStreamWaitValue32_v2");
static_assert(std::string_view(DYNAFLOW_TEXT(cuGraphAddKernelNode)) == "cuGraphAddKernelNode_v2");

TEST(CudaAbi, IsCheckedByTheCompiler) { SUCCEED(); }

}  // namespace
}  // namespace dynaflow::cuda
