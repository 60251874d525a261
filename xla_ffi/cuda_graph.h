// What the executor does to captured graphs before it launches them.
#pragma once

#include <string>
#include <vector>

#include "xla_ffi/cuda_driver.h"
#include "xla_ffi/status.h"

namespace dynaflow::cuda {

// A node as people want to see it.
struct NodeInfo {
  const char* type;
  std::string kernel;  // of a kernel node, where the driver can tell
  unsigned grid[3] = {};
  unsigned block[3] = {};
  unsigned shared_bytes = 0;
};
Result<std::vector<NodeInfo>> ListNodes(const Driver& driver, Graph graph);

// A copy of the graph whose kernels have this priority. (A node keeps the priority of the stream it was
// captured on, whatever stream launches the graph.)
Result<OwnedGraph> WithPriority(const Driver& driver, Graph graph, int priority);

// The graph captured once more, on `stream`: its kernels then run where that stream's do. This is the one way
// to move kernels to a green context; a context set on a node is accepted and ignored.
Result<OwnedGraph> RecaptureOn(const Driver& driver, Graph graph, Stream stream);

}  // namespace dynaflow::cuda
