#include "xla_ffi/tests/fake_driver.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

namespace dynaflow::cuda {
namespace {

FakeDriver* fake = nullptr;

}  // namespace

template <typename T>
T FakeDriver::NewHandle(std::string name) {
  const auto handle = reinterpret_cast<T>(next_handle_++ * 16);
  names_[handle] = std::move(name);
  return handle;
}

std::string FakeDriver::NameOf(const void* handle) const {
  const auto it = names_.find(handle);
  return it == names_.end() ? "null" : it->second;
}

template <typename... Args>
int FakeDriver::Call(const char* name, const Args&... args) {
  std::string line = name;
  auto add = [&](const auto& arg) {
    if constexpr (std::is_pointer_v<std::decay_t<decltype(arg)>>) {
      line += " " + NameOf(arg);
    } else {
      line += StrCat(" ", arg);
    }
  };
  (add(args), ...);
  const auto it = failures_.find(name);
  if (it != failures_.end() && it->second.second-- <= 0) {
    log_.push_back(line + " -> " + std::to_string(it->second.first));
    return it->second.first;
  }
  log_.push_back(line);
  return kSuccess;
}

// The driver's functions. Each finds its state through `fake`.
struct FakeCalls {
  template <typename T>
  static int Create(const char* call, const char* kind, T* out) {
    if (int error = fake->Call(call)) return error;
    *out = fake->NewHandle<T>(kind + std::to_string(fake->counts_[kind]++));
    ++fake->live_;
    return kSuccess;
  }
  static int Release(const void* handle, const char* call) {
    --fake->live_;
    return fake->Call(call, handle);
  }

  static GraphNode AddNode(Graph graph, FakeNode node) {
    const auto handle = fake->NewHandle<GraphNode>(StrCat("node", fake->counts_["node"]++));
    fake->nodes_[handle] = std::move(node);
    fake->graphs_[graph].push_back(handle);
    return handle;
  }
  // What a kernel of our own would do; empty for another one.
  static std::string Does(Function function, unsigned threads, void** params) {
    const std::string name = fake->NameOf(function);
    if (name == "dynaflow_flags") return Flags(threads, params);
    for (const char* element : {"float32", "bfloat16"}) {
      if (name == StrCat("dynaflow_sum_", element)) return Sum(element, params);
      if (name == StrCat("dynaflow_sum_and_norm_", element)) return Sum(element, params) + Norm(params);
    }
    return {};
  }
  // Groups of flags, one after the other.
  static std::string Flags(unsigned threads, void** params) {
    const auto* addresses = static_cast<const uint64_t*>(params[0]);
    const auto* kinds = static_cast<const uint32_t*>(params[1]);
    std::string text;
    for (uint32_t group = 0; group < *static_cast<const uint32_t*>(params[2]); ++group) {
      text += group ? "; " : "";
      for (unsigned i = 0; i < threads; ++i) {
        if (kinds[i] / 2 == group) text += StrCat(kinds[i] % 2 ? "wait " : "set ", addresses[i], " ");
      }
    }
    return text;
  }
  static std::string Sum(const char* element, void** params) {
    const auto number = [&](int i) { return *static_cast<const uint64_t*>(params[i]); };
    const auto each = [&](const char* before, int i) {
      const auto* addresses = static_cast<const uint64_t*>(params[i]);
      std::string text;
      for (uint32_t k = 0; k < *static_cast<const uint32_t*>(params[i + 1]); ++k) {
        text += StrCat(before, addresses[k], " ");
      }
      return text;
    };
    return StrCat(each("set ", 4), each("wait ", 6), each("add ", 2), "into ", number(0), ", ", number(1),
                  " bytes of ", element);
  }
  static std::string Norm(void** params) {
    const auto address = [&](int i) { return *static_cast<const uint64_t*>(params[i]); };
    const auto number = [&](int i) { return *static_cast<const uint32_t*>(params[i]); };
    const auto fraction = [&](int i) { return *static_cast<const float*>(params[i]); };
    return StrCat(", residual ", address(8), ", weight ", address(9), number(14) ? " wide" : "",
                  ", normed into ", address(10), ", rows of ", number(11), " pieces, 1/width ", fraction(12),
                  ", epsilon ", fraction(13), number(15) ? ", scale rounded" : "",
                  number(16) ? ", normed rounded" : "");
  }
  // Its nodes one after the other.
  static void Execute(Graph graph) {
    for (GraphNode handle : fake->graphs_[graph]) {
      const FakeNode& node = fake->nodes_[handle];
      if (node.type == kNodeEventRecord) {
        fake->recorded_[node.event] = fake->now_us_;
      } else {
        ++fake->now_us_;
      }
    }
  }
  // A node of what a stream captures follows the one before it.
  static void AddCaptured(Stream stream, FakeNode node) {
    const auto it = fake->capturing_.find(stream);
    if (it == fake->capturing_.end()) return;
    const auto& nodes = fake->graphs_[it->second];
    if (!nodes.empty()) node.after = {nodes.back()};
    AddNode(it->second, std::move(node));
  }

  static void Install(Driver& d) {
    d.GetErrorName = [](int, const char** name) { return *name = "CUDA_ERROR_FAKE", kSuccess; };
    d.GetErrorString = [](int, const char** text) { return *text = "as the test wanted", kSuccess; };
    d.Init = [](unsigned) { return kSuccess; };
    d.DeviceGet = [](Device* device, int ordinal) { return *device = ordinal, kSuccess; };
    d.DeviceGetCount = [](int* count) { return *count = 2, kSuccess; };
    d.DeviceGetAttribute = [](int* value, int, Device) { return *value = int(fake->sms), kSuccess; };
    d.PrimaryContextRetain = [](Context* context, Device) {
      return Create("PrimaryContextRetain", "context", context);
    };
    d.PrimaryContextRelease = [](Device) { return Release(nullptr, "PrimaryContextRelease"); };
    d.ContextPush = [](Context) { return ++fake->pushed_, kSuccess; };
    d.ContextPop = [](Context*) { return --fake->pushed_, kSuccess; };
    d.ContextGetDevice = [](Device* device) { return *device = 0, kSuccess; };
    d.EnablePeerAccess = [](Context peer, unsigned) { return fake->Call("EnablePeerAccess", peer); };

    d.MemAlloc = [](DevicePtr* address, size_t bytes) {
      if (int error = fake->Call("MemAlloc", bytes)) return error;
      ++fake->live_;
      return *address = 0x100000 * fake->next_handle_++, kSuccess;
    };
    d.MemFree = [](DevicePtr) { return Release(nullptr, "MemFree"); };
    d.IpcGetMemHandle = [](IpcHandle* handle, DevicePtr address) {
      if (int error = fake->Call("IpcGetMemHandle", address)) return error;
      std::memcpy(handle->reserved, &address, sizeof(address));
      return kSuccess;
    };
    d.IpcOpenMemHandle = [](DevicePtr* address, IpcHandle handle, unsigned flags) {
      std::memcpy(address, handle.reserved, sizeof(*address));
      *address += 1;  // elsewhere in this process
      return fake->Call("IpcOpenMemHandle", *address, flags);
    };

    d.StreamCreate = [](Stream* stream, unsigned, int priority) {
      if (int error = fake->Call("StreamCreate", priority)) return error;
      ++fake->live_;
      return *stream = fake->NewStream(StrCat("s", fake->counts_["s"]++)), kSuccess;
    };
    d.StreamDestroy = [](Stream stream) { return Release(stream, "StreamDestroy"); };
    d.StreamGetContext = [](Stream, Context* context) { return *context = nullptr, kSuccess; };
    d.StreamWaitEvent = [](Stream s, Event e, unsigned) { return fake->Call("StreamWaitEvent", s, e); };
    d.StreamSynchronize = [](Stream stream) { return fake->Call("StreamSynchronize", stream); };
    d.StreamBeginCapture = [](Stream stream, int) {
      if (int error = fake->Call("StreamBeginCapture", stream)) return error;
      if (fake->capturing_.contains(stream)) return FakeDriver::kBroken;
      fake->capturing_[stream] = fake->MakeGraph({});
      return kSuccess;
    };
    d.StreamEndCapture = [](Stream stream, Graph* graph) {
      const auto it = fake->capturing_.find(stream);
      if (it == fake->capturing_.end()) return FakeDriver::kBroken;
      const cuda::Graph captured = it->second;
      fake->capturing_.erase(it);  // the capture is over even where it failed
      if (int error = fake->Call("StreamEndCapture", stream)) return error;
      ++fake->live_;
      return *graph = captured, kSuccess;
    };

    d.EventCreate = [](Event* event, unsigned) { return Create("EventCreate", "e", event); };
    d.EventDestroy = [](Event event) { return Release(event, "EventDestroy"); };
    d.EventRecord = [](Event e, Stream s) {
      fake->recorded_[e] = fake->now_us_;
      return fake->Call("EventRecord", e, s);
    };
    d.EventElapsedTime = [](float* ms, Event start, Event end) {
      constexpr int kInvalidHandle = 400;  // never recorded
      if (int error = fake->Call("EventElapsedTime", start, end)) return error;
      if (!fake->recorded_.contains(start) || !fake->recorded_.contains(end)) return kInvalidHandle;
      *ms = static_cast<float>((fake->recorded_[end] - fake->recorded_[start]) / 1e3);
      return kSuccess;
    };
    d.EventQuery = [](Event e) { return fake->Call("EventQuery", e); };
    d.EventSynchronize = [](Event e) { return fake->Call("EventSynchronize", e); };

    d.StreamWriteValue = [](Stream s, DevicePtr address, uint32_t value, unsigned) {
      ++fake->now_us_;
      return fake->Call("StreamWriteValue", s, address, value);
    };
    d.StreamWaitValue = [](Stream s, DevicePtr address, uint32_t value, unsigned) {
      ++fake->now_us_;
      return fake->Call("StreamWaitValue", s, address, value);
    };
    d.AddMemOpNode = [](GraphNode* node, Graph graph, const GraphNode* after, size_t count,
                        const MemOpNodeParams* params) {
      if (int error = fake->Call("AddMemOpNode", params->count)) return error;
      *node = AddNode(graph, {.type = kNodeBatchMemOp,
                              .after = {after, after + count},
                              .ops = {params->ops, params->ops + params->count}});
      return kSuccess;
    };

    d.ModuleLoad = [](Module* module, const void*) { return Create("ModuleLoad", "module", module); };
    d.ModuleUnload = [](Module module) { return Release(module, "ModuleUnload"); };
    d.ModuleGetFunction = [](Function* function, Module, const char* name) {
      if (int error = fake->Call("ModuleGetFunction")) return error;
      return *function = fake->NewHandle<Function>(name), kSuccess;
    };
    d.AddKernelNode = [](GraphNode* node, Graph graph, const GraphNode* after, size_t count,
                         const KernelNodeParams* params) {
      if (int error = fake->Call("AddKernelNode", params->function)) return error;
      *node = AddNode(graph, {.after = {after, after + count},
                              .does = Does(params->function, params->block_x, params->params),
                              .grid = params->grid_x,
                              .threads = params->block_x});
      return kSuccess;
    };

    d.MemcpyAsync = [](DevicePtr dst, DevicePtr src, size_t bytes, Stream s) {
      ++fake->now_us_;
      return fake->Call("MemcpyAsync", dst, src, bytes, s);
    };
    d.MemcpyPeerAsync = [](DevicePtr dst, Context to, DevicePtr src, Context from, size_t bytes, Stream s) {
      return fake->Call("MemcpyPeerAsync", dst, to, src, from, bytes, s);
    };
    d.Memcpy3DAsync = [](const Memcpy3D* copy, Stream s) {
      AddCaptured(s, {.type = kNodeMemcpy, .copy = *copy});
      return fake->Call("Memcpy3DAsync", s);
    };
    d.MemsetD2D8Async = [](DevicePtr dst, size_t pitch, unsigned char value, size_t width, size_t height,
                           Stream s) {
      AddCaptured(s, {.type = kNodeMemset, .memset = {dst, pitch, value, 1, width, height}});
      return fake->Call("MemsetD2D8Async", s);
    };
    d.MemsetD2D16Async = [](DevicePtr dst, size_t pitch, unsigned short value, size_t width, size_t height,
                            Stream s) {
      AddCaptured(s, {.type = kNodeMemset, .memset = {dst, pitch, value, 2, width, height}});
      return fake->Call("MemsetD2D16Async", s);
    };
    d.MemsetD2D32Async = [](DevicePtr dst, size_t pitch, unsigned value, size_t width, size_t height,
                            Stream s) {
      AddCaptured(s, {.type = kNodeMemset, .memset = {dst, pitch, value, 4, width, height}});
      return fake->Call("MemsetD2D32Async", s);
    };
    d.LaunchKernel = [](const LaunchConfig* config, Function function, void** params, void**) {
      ++fake->now_us_;
      const std::string does = Does(function, config->block_x, params);
      FakeNode node{.does = does, .grid = config->grid_x};
      for (unsigned i = 0; i < config->num_attributes; ++i) {
        const LaunchAttribute& a = config->attributes[i];
        if (a.id == kAttributeClusterDimension) node.cluster = a.value.cluster.x;
      }
      AddCaptured(config->stream, std::move(node));
      if (does.empty()) return fake->Call("LaunchKernel", config->grid_x, config->stream);
      return fake->Call("LaunchKernel", config->grid_x, config->stream, does);
    };

    d.GraphCreate = [](Graph* graph, unsigned) {
      if (int error = fake->Call("GraphCreate")) return error;
      ++fake->live_;
      return *graph = fake->MakeGraph({}), kSuccess;
    };
    d.GraphDestroy = [](Graph graph) { return Release(graph, "GraphDestroy"); };
    d.GraphClone = [](Graph* clone, Graph original) {
      if (int error = fake->Call("GraphClone", original)) return error;
      std::vector<FakeNode> nodes;
      for (GraphNode node : fake->graphs_[original]) nodes.push_back(fake->nodes_[node]);
      ++fake->live_;
      return *clone = fake->MakeGraph(std::move(nodes)), kSuccess;
    };
    d.GraphGetNodes = [](Graph graph, GraphNode* out, size_t* count) {
      const auto& nodes = fake->graphs_[graph];
      if (out) std::copy(nodes.begin(), nodes.end(), out);
      return *count = nodes.size(), kSuccess;
    };
    d.GraphGetEdges = [](Graph graph, GraphNode* from, GraphNode* to, size_t* count) {
      size_t n = 0;
      for (GraphNode node : fake->graphs_[graph]) {
        for (GraphNode before : fake->nodes_[node].after) {
          if (from) {
            from[n] = before;
            to[n] = node;
          }
          ++n;
        }
      }
      return *count = n, kSuccess;
    };
    d.GraphNodeGetType = [](GraphNode node, NodeType* type) {
      return *type = fake->nodes_[node].type, kSuccess;
    };
    d.KernelNodeGetParams = [](GraphNode node, KernelNodeParams* params) {
      *params = {};
      params->function = reinterpret_cast<Function>(1);
      params->grid_x = fake->nodes_[node].grid;
      params->grid_y = params->grid_z = params->block_y = params->block_z = 1;
      params->block_x = 128;
      return kSuccess;
    };
    d.KernelNodeGetAttribute = [](GraphNode node, LaunchAttributeId id, LaunchAttributeValue* value) {
      *value = {};
      if (id == kAttributeClusterDimension) value->cluster.x = fake->nodes_[node].cluster;
      return kSuccess;
    };
    d.KernelNodeSetAttribute = [](GraphNode node, LaunchAttributeId id, const LaunchAttributeValue* value) {
      if (id == kAttributePriority) fake->nodes_[node].priority = value->priority;
      return fake->Call("KernelNodeSetAttribute", value->priority);
    };
    d.MemsetNodeGetParams = [](GraphNode node, MemsetNodeParams* p) {
      return *p = fake->nodes_[node].memset, kSuccess;
    };
    d.MemcpyNodeGetParams = [](GraphNode node, Memcpy3D* copy) {
      return *copy = fake->nodes_[node].copy, kSuccess;
    };
    d.ChildNodeGetGraph = [](GraphNode node, Graph* graph) {
      return *graph = fake->nodes_[node].child, kSuccess;
    };
    d.AddChildNode = [](GraphNode* node, Graph graph, const GraphNode* after, size_t count, Graph child) {
      if (int error = fake->Call("AddChildNode", child)) return error;
      *node = AddNode(graph, {.type = kNodeGraph, .after = {after, after + count}, .child = child});
      return kSuccess;
    };
    d.AddMemcpyNode = [](GraphNode* node, Graph graph, const GraphNode* after, size_t count,
                         const Memcpy3D* copy, Context) {
      if (int error = fake->Call("AddMemcpyNode", copy->dst_device, copy->src_device, copy->width))
        return error;
      *node = AddNode(graph, {.type = kNodeMemcpy, .after = {after, after + count}, .copy = *copy});
      return kSuccess;
    };
    d.AddEventRecordNode = [](GraphNode* node, Graph graph, const GraphNode* after, size_t count,
                              Event event) {
      if (int error = fake->Call("AddEventRecordNode", event)) return error;
      *node = AddNode(graph, {.type = kNodeEventRecord, .after = {after, after + count}, .event = event});
      return kSuccess;
    };
    d.GraphInstantiate = [](GraphExec* exec, Graph graph, unsigned long long) {
      if (int error = fake->Call("GraphInstantiate", graph)) return error;
      ++fake->live_;
      *exec = fake->NewHandle<GraphExec>(StrCat("exec(", fake->NameOf(graph), ")"));
      fake->execs_[*exec] = graph;
      return kSuccess;
    };
    d.GraphExecDestroy = [](GraphExec exec) { return Release(exec, "GraphExecDestroy"); };
    d.GraphExecSetMemcpy = [](GraphExec, GraphNode, const Memcpy3D* copy, Context) {
      return fake->Call("GraphExecSetMemcpy", copy->dst_device, copy->src_device, copy->width);
    };
    d.GraphLaunch = [](GraphExec exec, Stream stream) {
      fake->launched_ = exec;
      Execute(fake->execs_.at(exec));
      return fake->Call("GraphLaunch", exec, stream);
    };

    d.FunctionGetName = [](const char** name, Function) { return *name = "gemm", kSuccess; };
    d.DeviceGetResource = [](Device, Resource* resource, int type) {
      *resource = {};
      resource->type = type;
      return resource->sm_count = fake->sms, kSuccess;
    };
    d.SplitSms = [](Resource* groups, unsigned* num_groups, const Resource* all, Resource* rest, unsigned,
                    unsigned) {
      constexpr unsigned kPiece = 8;  // as on Hopper
      *num_groups = all->sm_count / kPiece;
      *rest = *all;
      rest->sm_count = all->sm_count % kPiece;
      for (unsigned i = 0; groups && i < *num_groups; ++i) {
        groups[i] = *all;
        groups[i].sm_count = kPiece;
      }
      return fake->Call("SplitSms");
    };
    d.DescribeResources = [](ResourceDesc* desc, Resource* resources, unsigned count) {
      unsigned sms = 0;
      for (unsigned i = 0; i < count; ++i) sms += resources[i].sm_count;
      *desc = fake->NewHandle<ResourceDesc>(StrCat(sms, "sms"));
      return kSuccess;
    };
    d.GreenContextCreate = [](GreenContext* context, ResourceDesc desc, Device, unsigned) {
      if (int error = fake->Call("GreenContextCreate", desc)) return error;
      ++fake->live_;
      *context = fake->NewHandle<GreenContext>(StrCat("green(", fake->NameOf(desc), ")"));
      return kSuccess;
    };
    d.GreenContextDestroy = [](GreenContext context) { return Release(context, "GreenContextDestroy"); };
    d.GreenStreamCreate = [](Stream* stream, GreenContext context, unsigned, int priority) {
      if (int error = fake->Call("GreenStreamCreate", context, priority)) return error;
      ++fake->live_;
      return *stream = fake->NewStream(StrCat("s", fake->counts_["s"]++)), kSuccess;
    };
  }
};

FakeDriver::FakeDriver() {
  fake = this;
  FakeCalls::Install(driver_);
}
FakeDriver::~FakeDriver() { fake = nullptr; }

std::vector<std::string> FakeDriver::TakeLog() { return std::exchange(log_, {}); }

Stream FakeDriver::NewStream(std::string name) { return NewHandle<Stream>(std::move(name)); }

OwnedGraph FakeDriver::NewGraph(std::vector<FakeNode> chain) {
  ++live_;
  return OwnedGraph(MakeGraph(std::move(chain)), {&driver_});
}

Graph FakeDriver::MakeGraph(std::vector<FakeNode> chain) {
  const auto graph = NewHandle<Graph>(StrCat("g", counts_["g"]++));
  graphs_[graph];
  for (FakeNode& node : chain) {
    node.after.clear();
    if (!graphs_[graph].empty()) node.after = {graphs_[graph].back()};
    FakeCalls::AddNode(graph, std::move(node));
  }
  return graph;
}

}  // namespace dynaflow::cuda
