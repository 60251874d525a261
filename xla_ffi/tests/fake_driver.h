// A CUDA driver that runs nothing: it writes down the calls, keeps graphs as data, and fails on demand.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "xla_ffi/cuda_driver.h"

namespace dynaflow::cuda {

struct FakeNode {
  NodeType type = kNodeKernel;
  std::vector<GraphNode> after;
  Graph child = nullptr;
  Memcpy3D copy{};
  MemsetNodeParams memset{};
  std::vector<MemOp> ops;
  std::string does;  // of a kernel of our own
  Event event = nullptr;
  unsigned grid = 1;
  unsigned threads = 0;  // of a block, if it is a kernel of our own
  unsigned cluster = 0;
  int priority = 0;
};

class FakeDriver {
 public:
  static constexpr int kBroken = 700;  // CUDA_ERROR_ILLEGAL_ADDRESS

  // One at a time: the table's functions find it through a global.
  FakeDriver();
  ~FakeDriver();

  const Driver& driver() const { return driver_; }
  Driver& driver() { return driver_; }

  // Calls so far, as "EventRecord fork s1", without the ones that only look. Clears them.
  std::vector<std::string> TakeLog();

  // From now on, the `skip`+1st call of this name and all later ones fail.
  void FailOn(std::string call, int code = kBroken, int skip = 0) {
    failures_[std::move(call)] = {code, skip};
  }
  void Heal() { failures_.clear(); }

  Stream NewStream(std::string name);
  // A graph of these nodes, each after the one before it.
  OwnedGraph NewGraph(std::vector<FakeNode> chain);

  const std::vector<GraphNode>& NodesOf(Graph graph) const { return graphs_.at(graph); }
  const FakeNode& Node(GraphNode node) const { return nodes_.at(node); }
  FakeNode& Node(GraphNode node) { return nodes_.at(node); }
  // The graph that was launched last.
  Graph launched() const { return execs_.at(launched_); }

  // Handles made and not destroyed: streams, events, graphs, graph executables, green contexts, retained
  // contexts.
  int live() const { return live_; }
  int pushed() const { return pushed_; }  // depth of the context stack

  unsigned sms = 132;

 private:
  friend struct FakeCalls;

  template <typename T>
  T NewHandle(std::string name);
  std::string NameOf(const void* handle) const;
  Graph MakeGraph(std::vector<FakeNode> chain);
  // Writes the call down; returns its result.
  template <typename... Args>
  int Call(const char* name, const Args&... args);

  Driver driver_;
  std::vector<std::string> log_;
  std::map<std::string, std::pair<int, int>> failures_;
  std::map<const void*, std::string> names_;
  std::map<std::string, int> counts_;
  std::map<Graph, std::vector<GraphNode>> graphs_;
  std::map<GraphNode, FakeNode> nodes_;
  std::map<GraphExec, Graph> execs_;
  std::map<Stream, Graph> capturing_;
  std::map<Event, double> recorded_;  // when, in microseconds
  double now_us_ = 0;                 // every piece of work takes one
  GraphExec launched_ = nullptr;
  uintptr_t next_handle_ = 1;
  int live_ = 0;
  int pushed_ = 0;
};

}  // namespace dynaflow::cuda
