#include "xla_ffi/cuda_graph.h"

#include <algorithm>
#include <unordered_map>

namespace dynaflow::cuda {
namespace {

const char* TypeName(NodeType type) {
  switch (type) {
    case kNodeKernel:
      return "kernel";
    case kNodeMemcpy:
      return "memcpy";
    case kNodeMemset:
      return "memset";
    case kNodeHost:
      return "host";
    case kNodeGraph:
      return "graph";
    case kNodeEmpty:
      return "empty";
    case kNodeEventRecord:
      return "event record";
    case kNodeMemAlloc:
      return "alloc";
    case kNodeMemFree:
      return "free";
    case kNodeBatchMemOp:
      return "batch memory operation";
    case kNodeConditional:
      return "conditional";
  }
  return "other";
}

Result<std::vector<GraphNode>> Nodes(const Driver& driver, Graph graph) {
  size_t count = 0;
  DYNAFLOW_CUDA(driver, GraphGetNodes, graph, nullptr, &count);
  std::vector<GraphNode> nodes(count);
  if (count) DYNAFLOW_CUDA(driver, GraphGetNodes, graph, nodes.data(), &count);
  return nodes;
}

struct Edges {
  std::vector<GraphNode> from, to;
};

// Edges may carry data (a kernel that starts before the one ahead of it ends). Where the driver knows of such
// data, it refuses to list the edges without a place for it.
Result<Edges> EdgesOf(const Driver& driver, Graph graph) {
  std::vector<uint64_t> data;
  auto get = [&](GraphNode* from, GraphNode* to, size_t* count) {
    if (driver.GraphGetEdgesAndData)
      return driver.GraphGetEdgesAndData(graph, from, to, from ? data.data() : nullptr, count);
    return driver.GraphGetEdges(graph, from, to, count);
  };
  size_t count = 0;
  DYNAFLOW_RETURN_IF_ERROR(driver.Check(get(nullptr, nullptr, &count), "GraphGetEdges"));
  data.resize(count);
  Edges edges{std::vector<GraphNode>(count), std::vector<GraphNode>(count)};
  if (count)
    DYNAFLOW_RETURN_IF_ERROR(driver.Check(get(edges.from.data(), edges.to.data(), &count), "GraphGetEdges"));
  return edges;
}

// The nodes in an order in which each follows those it depends on.
Result<std::vector<GraphNode>> NodesInOrder(const Driver& driver, Graph graph) {
  DYNAFLOW_ASSIGN(const std::vector<GraphNode> nodes, Nodes(driver, graph));
  DYNAFLOW_ASSIGN(const Edges edges, EdgesOf(driver, graph));
  std::unordered_map<GraphNode, size_t> open;  // how many dependencies are not in `order` yet
  std::unordered_multimap<GraphNode, GraphNode> dependents;
  for (size_t i = 0; i < edges.from.size(); ++i) {
    ++open[edges.to[i]];
    dependents.emplace(edges.from[i], edges.to[i]);
  }
  std::vector<GraphNode> order;
  for (GraphNode node : nodes) {
    if (open[node] == 0) order.push_back(node);
  }
  for (size_t i = 0; i < order.size(); ++i) {
    const auto [begin, end] = dependents.equal_range(order[i]);
    for (auto it = begin; it != end; ++it) {
      if (--open[it->second] == 0) order.push_back(it->second);
    }
  }
  if (order.size() != nodes.size()) return Internal("a captured graph has a cycle");
  return order;
}

Status SetPriority(const Driver& driver, Graph graph, int priority) {
  DYNAFLOW_ASSIGN(const std::vector<GraphNode> nodes, Nodes(driver, graph));
  for (GraphNode node : nodes) {
    NodeType type;
    DYNAFLOW_CUDA(driver, GraphNodeGetType, node, &type);
    if (type == kNodeKernel) {
      LaunchAttributeValue value{};
      value.priority = priority;
      DYNAFLOW_CUDA(driver, KernelNodeSetAttribute, node, kAttributePriority, &value);
    } else if (type == kNodeGraph) {
      Graph child = nullptr;
      DYNAFLOW_CUDA(driver, ChildNodeGetGraph, node, &child);
      DYNAFLOW_RETURN_IF_ERROR(SetPriority(driver, child, priority));
    }
  }
  return {};
}

Result<Function> FunctionOf(const Driver& driver, const KernelNodeParams& params) {
  if (params.function) return params.function;
  if (!driver.KernelGetFunction)
    return Unimplemented("the CUDA driver is too old to relaunch library kernels");
  Function function = nullptr;
  DYNAFLOW_CUDA(driver, KernelGetFunction, &function, params.kernel);
  return function;
}

Status RelaunchKernel(const Driver& driver, GraphNode node, Stream stream) {
  KernelNodeParams params{};
  DYNAFLOW_CUDA(driver, KernelNodeGetParams, node, &params);
  DYNAFLOW_ASSIGN(const Function function, FunctionOf(driver, params));

  // What changes how the kernel runs, rather than when: without its cluster it would be another kernel.
  LaunchAttribute attributes[3] = {};
  unsigned count = 0;
  for (LaunchAttributeId id : {kAttributeClusterDimension, kAttributeClusterPolicy, kAttributeCooperative}) {
    LaunchAttributeValue value{};
    if (driver.KernelNodeGetAttribute(node, id, &value) != kSuccess) continue;
    if (id == kAttributeClusterDimension && value.cluster.x == 0) continue;
    if (id == kAttributeClusterPolicy && value.cluster_policy == 0) continue;
    if (id == kAttributeCooperative && value.cooperative == 0) continue;
    attributes[count].id = id;
    attributes[count++].value = value;
  }
  const LaunchConfig config{.grid_x = params.grid_x,
                            .grid_y = params.grid_y,
                            .grid_z = params.grid_z,
                            .block_x = params.block_x,
                            .block_y = params.block_y,
                            .block_z = params.block_z,
                            .shared_bytes = params.shared_bytes,
                            .stream = stream,
                            .attributes = attributes,
                            .num_attributes = count};
  DYNAFLOW_CUDA(driver, LaunchKernel, &config, function, params.params, params.extra);
  return {};
}

Status RelaunchMemset(const Driver& driver, GraphNode node, Stream stream) {
  MemsetNodeParams m{};
  DYNAFLOW_CUDA(driver, MemsetNodeGetParams, node, &m);
  const size_t height = std::max<size_t>(m.height, 1);
  const size_t pitch = std::max<size_t>(m.pitch, m.width * m.element_bytes);
  switch (m.element_bytes) {
    case 1:
      DYNAFLOW_CUDA(driver, MemsetD2D8Async, m.dst, pitch, static_cast<unsigned char>(m.value), m.width,
                    height, stream);
      return {};
    case 2:
      DYNAFLOW_CUDA(driver, MemsetD2D16Async, m.dst, pitch, static_cast<unsigned short>(m.value), m.width,
                    height, stream);
      return {};
    case 4:
      DYNAFLOW_CUDA(driver, MemsetD2D32Async, m.dst, pitch, m.value, m.width, height, stream);
      return {};
  }
  return Internal("a memset of elements of ", m.element_bytes, " bytes");
}

Status Relaunch(const Driver& driver, Graph graph, Stream stream) {
  DYNAFLOW_ASSIGN(const std::vector<GraphNode> nodes, NodesInOrder(driver, graph));
  for (GraphNode node : nodes) {
    NodeType type;
    DYNAFLOW_CUDA(driver, GraphNodeGetType, node, &type);
    switch (type) {
      case kNodeKernel:
        DYNAFLOW_RETURN_IF_ERROR(RelaunchKernel(driver, node, stream));
        break;
      case kNodeMemset:
        DYNAFLOW_RETURN_IF_ERROR(RelaunchMemset(driver, node, stream));
        break;
      case kNodeMemcpy: {
        Memcpy3D copy{};
        DYNAFLOW_CUDA(driver, MemcpyNodeGetParams, node, &copy);
        DYNAFLOW_CUDA(driver, Memcpy3DAsync, &copy, stream);
        break;
      }
      case kNodeGraph: {
        Graph child = nullptr;
        DYNAFLOW_CUDA(driver, ChildNodeGetGraph, node, &child);
        DYNAFLOW_RETURN_IF_ERROR(Relaunch(driver, child, stream));
        break;
      }
      case kNodeEmpty:
        break;
      default:
        return Unimplemented("a graph with a node of type '", TypeName(type), "' cannot be bound to SMs");
    }
  }
  return {};
}

}  // namespace

Result<std::vector<NodeInfo>> ListNodes(const Driver& driver, Graph graph) {
  DYNAFLOW_ASSIGN(const std::vector<GraphNode> nodes, NodesInOrder(driver, graph));
  std::vector<NodeInfo> infos;
  for (GraphNode node : nodes) {
    NodeType type;
    DYNAFLOW_CUDA(driver, GraphNodeGetType, node, &type);
    NodeInfo info{.type = TypeName(type), .kernel = {}};
    if (type == kNodeKernel) {
      KernelNodeParams p{};
      DYNAFLOW_CUDA(driver, KernelNodeGetParams, node, &p);
      const unsigned grid[] = {p.grid_x, p.grid_y, p.grid_z}, block[] = {p.block_x, p.block_y, p.block_z};
      std::copy_n(grid, 3, info.grid);
      std::copy_n(block, 3, info.block);
      info.shared_bytes = p.shared_bytes;
      const char* name = nullptr;
      const auto function = FunctionOf(driver, p);
      if (function.ok() && driver.FunctionGetName &&
          driver.FunctionGetName(&name, function.value()) == kSuccess && name) {
        info.kernel = name;
      }
    }
    infos.push_back(std::move(info));
  }
  return infos;
}

Result<OwnedGraph> WithPriority(const Driver& driver, Graph graph, int priority) {
  Graph raw = nullptr;
  DYNAFLOW_CUDA(driver, GraphClone, &raw, graph);
  OwnedGraph clone(raw, {&driver});
  DYNAFLOW_RETURN_IF_ERROR(SetPriority(driver, clone.get(), priority));
  return clone;
}

Result<OwnedGraph> RecaptureOn(const Driver& driver, Graph graph, Stream stream) {
  DYNAFLOW_CUDA(driver, StreamBeginCapture, stream, kCaptureRelaxed);
  const Status relaunched = Relaunch(driver, graph, stream);
  Graph raw = nullptr;  // end the capture in any case: a stream left capturing is lost
  const Status ended = driver.Check(driver.StreamEndCapture(stream, &raw), "StreamEndCapture");
  OwnedGraph result(raw, {&driver});
  DYNAFLOW_RETURN_IF_ERROR(relaunched);
  DYNAFLOW_RETURN_IF_ERROR(ended);
  return result;
}

}  // namespace dynaflow::cuda
