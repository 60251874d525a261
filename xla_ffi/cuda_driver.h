// The part of the CUDA driver's interface that the executor uses, found at run time.
//
// Everything here mirrors cuda.h, so that building needs no CUDA at all; tests/cuda_abi_test.cc compares the
// two wherever cuda.h is installed. All calls go through a table of function pointers, and tests put a fake
// in its place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "xla_ffi/status.h"

// Handles keep their tags from cuda.h and thereby its types.
struct CUctx_st;
struct CUevent_st;
struct CUfunc_st;
struct CUgraphExec_st;
struct CUgraphNode_st;
struct CUgraph_st;
struct CUgreenCtx_st;
struct CUdevResourceDesc_st;
struct CUkern_st;
struct CUmod_st;
struct CUstream_st;

namespace dynaflow::cuda {

using Context = CUctx_st*;
using Event = CUevent_st*;
using Function = CUfunc_st*;
using Graph = CUgraph_st*;
using GraphExec = CUgraphExec_st*;
using GraphNode = CUgraphNode_st*;
using GreenContext = CUgreenCtx_st*;
using ResourceDesc = CUdevResourceDesc_st*;
using Kernel = CUkern_st*;
using Module = CUmod_st*;
using Stream = CUstream_st*;
using Device = int;
using DevicePtr = unsigned long long;

// CUresult and the flags are ints in the ABI; these are the values we name.
inline constexpr int kSuccess = 0;
inline constexpr int kErrorNotReady = 600;
inline constexpr int kErrorPeerAccessUnsupported = 217;
inline constexpr int kErrorPeerAccessAlreadyEnabled = 704;

inline constexpr unsigned kIpcLazyEnablePeerAccess = 1;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDefault = 0;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr int kCaptureRelaxed = 2;
inline constexpr int kAttributeSmCount = 16;
inline constexpr int kAttributeMajor = 75;  // of the compute capability
inline constexpr int kMemoryDevice = 2;
inline constexpr int kResourceSm = 1;
inline constexpr unsigned kGreenDefaultStream = 1;

enum NodeType : int {
  kNodeKernel = 0,
  kNodeMemcpy = 1,
  kNodeMemset = 2,
  kNodeHost = 3,
  kNodeGraph = 4,
  kNodeEmpty = 5,
  kNodeEventRecord = 7,
  kNodeMemAlloc = 10,
  kNodeMemFree = 11,
  kNodeBatchMemOp = 12,
  kNodeConditional = 13,
};

enum LaunchAttributeId : int {
  kAttributeCooperative = 2,
  kAttributeClusterDimension = 4,
  kAttributeClusterPolicy = 5,
  kAttributePriority = 8,
};

union LaunchAttributeValue {
  char pad[64];
  struct {
    unsigned x, y, z;
  } cluster;
  int cooperative;
  int cluster_policy;
  int priority;
  uint64_t align;
};

struct LaunchAttribute {
  int id;
  char pad[4];
  LaunchAttributeValue value;
};

// An operation on 4 bytes of memory, in stream order.
enum MemOpType : int {
  kWaitValue32 = 1,
  kWriteValue32 = 2,
};
inline constexpr unsigned kWaitValueGeq = 0;
inline constexpr unsigned kMaxMemOps = 256;  // of one node

union MemOp {
  MemOpType type;
  struct {  // the same for both types
    MemOpType type;
    DevicePtr address;
    union {
      uint32_t value;
      uint64_t value64;
    };
    unsigned flags;
    DevicePtr alias;
  } on;
  uint64_t pad[6];
};

struct MemOpNodeParams {
  Context context;
  unsigned count;
  MemOp* ops;
  unsigned flags;
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

struct KernelNodeParams {
  Function function;
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void** params;
  void** extra;
  Kernel kernel;
  Context context;
};

struct MemsetNodeParams {
  DevicePtr dst;
  size_t pitch;
  unsigned value;
  unsigned element_bytes;
  size_t width;  // in elements
  size_t height;
};

struct Memcpy3D {
  size_t src_x, src_y, src_z, src_lod;
  int src_type;
  const void* src_host;
  DevicePtr src_device;
  void* src_array;
  void* reserved0;
  size_t src_pitch, src_height;
  size_t dst_x, dst_y, dst_z, dst_lod;
  int dst_type;
  void* dst_host;
  DevicePtr dst_device;
  void* dst_array;
  void* reserved1;
  size_t dst_pitch, dst_height;
  size_t width, height, depth;
};

// By which another process opens memory.
struct IpcHandle {
  char reserved[64];
};

// A set of a device's SMs.
struct Resource {
  int type;
  unsigned char internal[92];
  union {
    unsigned sm_count;
    unsigned char external[48];
  };
};

// NEEDED(name, symbol, parameters...): a driver without one of these is refused.
// EXTRA(...): features that newer drivers add; null where missing.
#define DYNAFLOW_CUDA_DRIVER(NEEDED, EXTRA)                                                                 \
  NEEDED(Init, "cuInit", unsigned flags)                                                                    \
  NEEDED(GetErrorName, "cuGetErrorName", int error, const char** name)                                      \
  NEEDED(GetErrorString, "cuGetErrorString", int error, const char** text)                                  \
  NEEDED(DeviceGet, "cuDeviceGet", Device* device, int ordinal)                                             \
  NEEDED(DeviceGetCount, "cuDeviceGetCount", int* count)                                                    \
  NEEDED(DeviceGetAttribute, "cuDeviceGetAttribute", int* value, int attribute, Device device)              \
  NEEDED(PrimaryContextRetain, "cuDevicePrimaryCtxRetain", Context* context, Device device)                 \
  NEEDED(PrimaryContextRelease, "cuDevicePrimaryCtxRelease_v2", Device device)                              \
  NEEDED(ContextPush, "cuCtxPushCurrent_v2", Context context)                                               \
  NEEDED(ContextPop, "cuCtxPopCurrent_v2", Context* context)                                                \
  NEEDED(ContextGetDevice, "cuCtxGetDevice", Device* device)                                                \
  NEEDED(EnablePeerAccess, "cuCtxEnablePeerAccess", Context peer, unsigned flags)                           \
  NEEDED(StreamCreate, "cuStreamCreateWithPriority", Stream* stream, unsigned flags, int priority)          \
  NEEDED(StreamDestroy, "cuStreamDestroy_v2", Stream stream)                                                \
  NEEDED(StreamGetContext, "cuStreamGetCtx", Stream stream, Context* context)                               \
  NEEDED(StreamWaitEvent, "cuStreamWaitEvent", Stream stream, Event event, unsigned flags)                  \
  NEEDED(StreamSynchronize, "cuStreamSynchronize", Stream stream)                                           \
  NEEDED(StreamBeginCapture, "cuStreamBeginCapture_v2", Stream stream, int mode)                            \
  NEEDED(StreamEndCapture, "cuStreamEndCapture", Stream stream, Graph* graph)                               \
  NEEDED(EventCreate, "cuEventCreate", Event* event, unsigned flags)                                        \
  NEEDED(EventDestroy, "cuEventDestroy_v2", Event event)                                                    \
  NEEDED(EventRecord, "cuEventRecord", Event event, Stream stream)                                          \
  NEEDED(EventQuery, "cuEventQuery", Event event)                                                           \
  NEEDED(EventSynchronize, "cuEventSynchronize", Event event)                                               \
  NEEDED(EventElapsedTime, "cuEventElapsedTime", float* ms, Event start, Event end)                         \
  NEEDED(MemAlloc, "cuMemAlloc_v2", DevicePtr* address, size_t bytes)                                       \
  NEEDED(MemFree, "cuMemFree_v2", DevicePtr address)                                                        \
  NEEDED(IpcGetMemHandle, "cuIpcGetMemHandle", IpcHandle* handle, DevicePtr address)                        \
  NEEDED(IpcOpenMemHandle, "cuIpcOpenMemHandle_v2", DevicePtr* address, IpcHandle handle, unsigned flags)   \
  NEEDED(MemcpyAsync, "cuMemcpyAsync", DevicePtr dst, DevicePtr src, size_t bytes, Stream stream)           \
  NEEDED(MemcpyPeerAsync, "cuMemcpyPeerAsync", DevicePtr dst, Context dst_context, DevicePtr src,           \
         Context src_context, size_t bytes, Stream stream)                                                  \
  NEEDED(Memcpy3DAsync, "cuMemcpy3DAsync_v2", const Memcpy3D* copy, Stream stream)                          \
  NEEDED(MemsetD2D8Async, "cuMemsetD2D8Async", DevicePtr dst, size_t pitch, unsigned char value,            \
         size_t width, size_t height, Stream stream)                                                        \
  NEEDED(MemsetD2D16Async, "cuMemsetD2D16Async", DevicePtr dst, size_t pitch, unsigned short value,         \
         size_t width, size_t height, Stream stream)                                                        \
  NEEDED(MemsetD2D32Async, "cuMemsetD2D32Async", DevicePtr dst, size_t pitch, unsigned value, size_t width, \
         size_t height, Stream stream)                                                                      \
  NEEDED(LaunchKernel, "cuLaunchKernelEx", const LaunchConfig* config, Function function, void** params,    \
         void** extra)                                                                                      \
  NEEDED(GraphCreate, "cuGraphCreate", Graph* graph, unsigned flags)                                        \
  NEEDED(GraphDestroy, "cuGraphDestroy", Graph graph)                                                       \
  NEEDED(GraphClone, "cuGraphClone", Graph* clone, Graph original)                                          \
  NEEDED(GraphGetNodes, "cuGraphGetNodes", Graph graph, GraphNode* nodes, size_t* count)                    \
  NEEDED(GraphGetEdges, "cuGraphGetEdges", Graph graph, GraphNode* from, GraphNode* to, size_t* count)      \
  NEEDED(GraphNodeGetType, "cuGraphNodeGetType", GraphNode node, NodeType* type)                            \
  NEEDED(KernelNodeGetParams, "cuGraphKernelNodeGetParams_v2", GraphNode node, KernelNodeParams* params)    \
  NEEDED(KernelNodeGetAttribute, "cuGraphKernelNodeGetAttribute", GraphNode node, LaunchAttributeId id,     \
         LaunchAttributeValue* value)                                                                       \
  NEEDED(KernelNodeSetAttribute, "cuGraphKernelNodeSetAttribute", GraphNode node, LaunchAttributeId id,     \
         const LaunchAttributeValue* value)                                                                 \
  NEEDED(MemsetNodeGetParams, "cuGraphMemsetNodeGetParams", GraphNode node, MemsetNodeParams* params)       \
  NEEDED(MemcpyNodeGetParams, "cuGraphMemcpyNodeGetParams", GraphNode node, Memcpy3D* params)               \
  NEEDED(ChildNodeGetGraph, "cuGraphChildGraphNodeGetGraph", GraphNode node, Graph* graph)                  \
  NEEDED(AddChildNode, "cuGraphAddChildGraphNode", GraphNode* node, Graph graph, const GraphNode* after,    \
         size_t num_after, Graph child)                                                                     \
  NEEDED(AddMemcpyNode, "cuGraphAddMemcpyNode", GraphNode* node, Graph graph, const GraphNode* after,       \
         size_t num_after, const Memcpy3D* copy, Context context)                                           \
  NEEDED(AddEventRecordNode, "cuGraphAddEventRecordNode", GraphNode* node, Graph graph,                     \
         const GraphNode* after, size_t num_after, Event event)                                             \
  NEEDED(GraphInstantiate, "cuGraphInstantiateWithFlags", GraphExec* exec, Graph graph,                     \
         unsigned long long flags)                                                                          \
  NEEDED(GraphExecDestroy, "cuGraphExecDestroy", GraphExec exec)                                            \
  NEEDED(GraphExecSetMemcpy, "cuGraphExecMemcpyNodeSetParams", GraphExec exec, GraphNode node,              \
         const Memcpy3D* copy, Context context)                                                             \
  NEEDED(GraphLaunch, "cuGraphLaunch", GraphExec exec, Stream stream)                                       \
  EXTRA(GraphGetEdgesAndData, "cuGraphGetEdges_v2", Graph graph, GraphNode* from, GraphNode* to,            \
        uint64_t* data, size_t* count)                                                                      \
  EXTRA(StreamWriteValue, "cuStreamWriteValue32_v2", Stream stream, DevicePtr address, uint32_t value,      \
        unsigned flags)                                                                                     \
  EXTRA(StreamWaitValue, "cuStreamWaitValue32_v2", Stream stream, DevicePtr address, uint32_t value,        \
        unsigned flags)                                                                                     \
  EXTRA(AddMemOpNode, "cuGraphAddBatchMemOpNode", GraphNode* node, Graph graph, const GraphNode* after,     \
        size_t num_after, const MemOpNodeParams* params)                                                    \
  EXTRA(ModuleLoad, "cuModuleLoadData", Module* module, const void* image)                                  \
  EXTRA(ModuleUnload, "cuModuleUnload", Module module)                                                      \
  EXTRA(ModuleGetFunction, "cuModuleGetFunction", Function* function, Module module, const char* name)      \
  EXTRA(AddKernelNode, "cuGraphAddKernelNode_v2", GraphNode* node, Graph graph, const GraphNode* after,     \
        size_t num_after, const KernelNodeParams* params)                                                   \
  EXTRA(FunctionGetName, "cuFuncGetName", const char** name, Function function)                             \
  EXTRA(KernelGetFunction, "cuKernelGetFunction", Function* function, Kernel kernel)                        \
  EXTRA(DeviceGetResource, "cuDeviceGetDevResource", Device device, Resource* resource, int type)           \
  EXTRA(SplitSms, "cuDevSmResourceSplitByCount", Resource* groups, unsigned* num_groups,                    \
        const Resource* all, Resource* rest, unsigned flags, unsigned min_count)                            \
  EXTRA(DescribeResources, "cuDevResourceGenerateDesc", ResourceDesc* desc, Resource* resources,            \
        unsigned count)                                                                                     \
  EXTRA(GreenContextCreate, "cuGreenCtxCreate", GreenContext* context, ResourceDesc desc, Device device,    \
        unsigned flags)                                                                                     \
  EXTRA(GreenContextDestroy, "cuGreenCtxDestroy", GreenContext context)                                     \
  EXTRA(GreenStreamCreate, "cuGreenCtxStreamCreate", Stream* stream, GreenContext context, unsigned flags,  \
        int priority)

struct Driver {
#define DYNAFLOW_MEMBER(name, symbol, ...) int (*name)(__VA_ARGS__) = nullptr;
  DYNAFLOW_CUDA_DRIVER(DYNAFLOW_MEMBER, DYNAFLOW_MEMBER)
#undef DYNAFLOW_MEMBER

  // The process's driver, loaded and initialised at the first call; or why there is none.
  static Result<const Driver*> Get();

  // Success, or an error with the call and CUDA's name and text for it.
  Status Check(int result, const char* call) const;

  bool has_green_contexts() const {
    return DeviceGetResource && SplitSms && DescribeResources && GreenContextCreate && GreenContextDestroy &&
           GreenStreamCreate;
  }
};

// Handles that destroy themselves.
template <auto Member>
struct Destroy {
  const Driver* driver = nullptr;
  template <typename T>
  void operator()(T* handle) const {
    (driver->*Member)(handle);  // nothing useful can be done about a failure here
  }
};
using OwnedEvent = std::unique_ptr<CUevent_st, Destroy<&Driver::EventDestroy>>;
using OwnedGraph = std::unique_ptr<CUgraph_st, Destroy<&Driver::GraphDestroy>>;
using OwnedGraphExec = std::unique_ptr<CUgraphExec_st, Destroy<&Driver::GraphExecDestroy>>;
using OwnedGreenContext = std::unique_ptr<CUgreenCtx_st, Destroy<&Driver::GreenContextDestroy>>;
using OwnedModule = std::unique_ptr<CUmod_st, Destroy<&Driver::ModuleUnload>>;
using OwnedStream = std::unique_ptr<CUstream_st, Destroy<&Driver::StreamDestroy>>;

// An event of the current context.
Result<OwnedEvent> MakeEvent(const Driver& driver, unsigned flags);

// A device's primary context, the one that JAX uses, kept alive.
class PrimaryContext {
 public:
  static Result<PrimaryContext> Retain(const Driver& driver, int ordinal);
  PrimaryContext() = default;
  PrimaryContext(PrimaryContext&& other) noexcept { *this = std::move(other); }
  PrimaryContext& operator=(PrimaryContext&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(device_, other.device_);
    std::swap(context_, other.context_);
    return *this;
  }
  ~PrimaryContext() {
    if (driver_) driver_->PrimaryContextRelease(device_);
  }

  Context get() const { return context_; }
  Device device() const { return device_; }

 private:
  const Driver* driver_ = nullptr;
  Device device_ = 0;
  Context context_ = nullptr;
};

// Makes a context current for a scope.
class ScopedContext {
 public:
  ScopedContext(const Driver& driver, Context context)
      : driver_(driver), status_(driver.Check(driver.ContextPush(context), "cuCtxPushCurrent")) {}
  ~ScopedContext() {
    Context popped;
    if (status_.ok()) driver_.ContextPop(&popped);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

  const Status& status() const { return status_; }

 private:
  const Driver& driver_;
  Status status_;
};

Result<int> SmCount(const Driver& driver, int ordinal);

// Waits for all that has been enqueued on a stream, of whichever device.
Status Synchronize(const Driver& driver, Stream stream);

// The ordinal of the device that a stream belongs to.
Result<int> DeviceOf(const Driver& driver, Stream stream);

}  // namespace dynaflow::cuda

// In a function that returns a Status, with `driver` a Driver: calls it, and returns its error.
#define DYNAFLOW_CUDA(driver, name, ...) \
  DYNAFLOW_RETURN_IF_ERROR((driver).Check((driver).name(__VA_ARGS__), #name))
