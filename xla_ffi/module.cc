// The extension module dynaflow_jax._dispatch.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "xla_ffi/capture.h"
#include "xla_ffi/cuda_device.h"
#include "xla_ffi/cuda_driver.h"
#include "xla_ffi/cuda_graph.h"
#include "xla_ffi/cuda_ipc.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/host_device.h"
#include "xla_ffi/order.h"
#include "xla_ffi/peers.h"
#include "xla_ffi/program.h"
#include "xla_ffi/registry.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dynaflow {
namespace {

struct DispatchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void Raise(const Status& status) {
  if (!status.ok()) throw DispatchError(status.message());
}

template <typename T>
T ValueOrRaise(Result<T> result) {
  Raise(result.status());
  return std::move(*result);
}

// A Python object that threads without the GIL may hold and drop.
std::shared_ptr<nb::object> Hold(nb::object object) {
  return std::shared_ptr<nb::object>(new nb::object(std::move(object)), [](nb::object* held) {
    if (!nb::is_alive()) return;  // the interpreter is gone, and the object with it
    nb::gil_scoped_acquire gil;
    delete held;
  });
}

// A Python text as UTF-8. It may have what UTF-8 has not: surrogates, as in the name of a file that is no
// text.
std::string Text(nb::handle text) {
  const nb::bytes bytes(text.attr("encode")("utf-8", "backslashreplace"));
  return {bytes.c_str(), bytes.size()};
}

// What an exception says, whatever its class does when it is asked.
std::string Told(nb::python_error& error) {
  std::string name = "an exception";
  try {
    name = Text(error.type().attr("__name__"));
    return StrCat(name, ": ", Text(nb::str(error.value())));
  } catch (const std::exception&) {
    return name + ", which has no text";
  }
}

// Calls Python from a thread that does not hold the GIL.
template <typename... Args>
Status CallPython(const std::shared_ptr<nb::object>& function, const Args&... args) {
  if (!nb::is_alive()) return FailedPrecondition("the Python interpreter has finished");
  nb::gil_scoped_acquire gil;
  try {
    (*function)(args...);
    return {};
  } catch (nb::python_error& error) {
    return Internal(Told(error));
  } catch (const std::exception& error) {
    return Internal(error.what());
  }
}

std::vector<void*> Pointers(const std::vector<uint64_t>& addresses) {
  std::vector<void*> pointers;
  for (uint64_t a : addresses) pointers.push_back(reinterpret_cast<void*>(a));
  return pointers;
}

std::string_view View(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

Program DecodeChecked(const nb::bytes& blob, bool order_overlaps) {
  const std::string_view bytes = View(blob);
  nb::gil_scoped_release nogil;  // a long program takes its time
  Program program = ValueOrRaise(Decode(bytes));
  if (order_overlaps) ValueOrRaise(OrderOverlaps(program));
  Raise(CheckOverlap(program));
  return program;
}

// What on_miss gets of each call: its device, and the addresses of its inputs and outputs.
using Missed = std::vector<std::tuple<int, std::vector<uint64_t>, std::vector<uint64_t>>>;

double CheckedTimeout(double seconds) {
  if (!(seconds > 0)) Raise(InvalidArgument("timeout_s is ", seconds, ", not above 0"));  // a NaN neither
  return std::min(seconds, kMaxTimeout);
}

int64_t CreatePlan(nb::object on_miss, size_t capacity, size_t participants, double timeout_s, bool across) {
  if (participants == 0) Raise(InvalidArgument("a plan has at least one participant"));
  timeout_s = CheckedTimeout(timeout_s);
  Plan::OnMiss callback;
  if (!on_miss.is_none()) {
    callback = [held = Hold(std::move(on_miss))](std::span<const Call> calls) {
      Missed missed;
      for (const Call& call : calls)
        missed.emplace_back(call.device, Addresses(call.inputs), Addresses(call.outputs));
      return CallPython(held, missed);
    };
  }
  return Registry::Global().Add(
      std::make_shared<Plan>(std::move(callback), capacity, participants, timeout_s, across));
}

void SetPeers(int64_t plan_id, uint64_t own,
              const std::vector<std::tuple<std::string, int, uint64_t>>& others, double timeout_s,
              nb::object keep_alive) {
  std::vector<Peers::Process> processes;
  for (const auto& [name, pidfd, notice] : others) {
    processes.push_back({name, pidfd, reinterpret_cast<const Notice*>(notice)});
  }
  ValueOrRaise(Registry::Global().Find(plan_id))
      ->SetPeers(std::make_shared<Peers>(reinterpret_cast<Notice*>(own), std::move(processes),
                                         CheckedTimeout(timeout_s), Hold(std::move(keep_alive))));
}

void AddHostProgram(int64_t plan_id, int device, const nb::bytes& blob, const nb::list& functions,
                    bool order_overlaps, bool timed, std::vector<int> processes, nb::object keep_alive) {
  const auto plan = ValueOrRaise(Registry::Global().Find(plan_id));
  Program program = DecodeChecked(blob, order_overlaps);
  std::vector<HostPartition> partitions;
  for (nb::handle f : functions) {
    partitions.push_back([held = Hold(nb::borrow(f))] { return CallPython(held); });
  }
  auto on = ValueOrRaise(HostDevice::Create(program, std::move(partitions), timed, std::move(processes)));
  auto executor = std::make_shared<Executor>(std::move(program), std::move(on), Hold(std::move(keep_alive)));
  nb::gil_scoped_release nogil;  // an evicted program's threads may be about to take it
  plan->Add(device, std::move(executor));
}

void AddCudaProgram(int64_t plan_id, const std::vector<int>& devices, const nb::bytes& blob,
                    bool order_overlaps, bool one_graph, bool blocking, bool timed, nb::object keep_alive) {
  const auto plan = ValueOrRaise(Registry::Global().Find(plan_id));
  const cuda::Driver* driver = ValueOrRaise(cuda::Driver::Get());
  Program program = DecodeChecked(blob, order_overlaps);
  std::vector<std::shared_ptr<const Capture>> captures;
  for (int64_t id : program.partitions) captures.push_back(ValueOrRaise(Captures::Global().Find(id)));
  auto held = Hold(std::move(keep_alive));

  nb::gil_scoped_release nogil;
  auto on = ValueOrRaise(CudaDevice::Create(*driver, devices, program, std::move(captures),
                                            {.one_graph = one_graph, .blocking = blocking, .timed = timed}));
  plan->Add(devices[0], std::make_shared<Executor>(std::move(program), std::move(on), std::move(held)));
}

void RunHost(int64_t plan_id, int device, const std::vector<uint64_t>& inputs,
             const std::vector<uint64_t>& outputs, int64_t run_id) {
  const auto in = Pointers(inputs), out = Pointers(outputs);
  const auto plan = ValueOrRaise(Registry::Global().Find(plan_id));
  nb::gil_scoped_release nogil;
  Raise(plan->Run(Call{.device = device, .inputs = in, .outputs = out, .run_id = run_id}));
}

nb::dict PlanStats(int64_t plan_id) {
  const auto plan = ValueOrRaise(Registry::Global().Find(plan_id));
  std::vector<std::pair<int, std::string>> modes;
  Plan::Stats stats;
  {
    nb::gil_scoped_release nogil;  // Mode waits for a run that may want the GIL
    stats = plan->stats();
    for (const auto& [device, executor] : plan->programs()) modes.emplace_back(device, executor->Mode());
  }
  nb::list shown;
  for (const auto& [device, mode] : modes) shown.append(nb::make_tuple(device, mode));
  nb::dict dict;
  dict["programs"] = shown;
  dict["runs"] = stats.runs;
  dict["misses"] = stats.misses;
  dict["evictions"] = stats.evictions;
  dict["participants"] = stats.participants;
  dict["broken"] = stats.broken;
  return dict;
}

const char* NameOf(CommandKind kind) {
  switch (kind) {
    case CommandKind::kLaunch:
      return "launch";
    case CommandKind::kCopy:
      return "copy";
    case CommandKind::kRecord:
      return "record";
    case CommandKind::kWait:
      return "wait";
    case CommandKind::kSignal:
      return "signal";
    case CommandKind::kAwait:
      return "await";
    case CommandKind::kSum:
      return "sum";
  }
  return "unknown";
}

// What a command moves: all that it may read and write, what a copy copies, nothing for a flag.
uint64_t BytesMoved(const Command& c) {
  if (c.kind == CommandKind::kCopy) return c.writes[0].bytes ? c.rows.count * RowBytes(c) : 0;
  uint64_t bytes = 0;
  if (Computes(c)) {
    for (const Range& r : c.reads) bytes += r.bytes;
    for (const Range& r : c.writes) bytes += r.bytes;
  }
  return bytes;
}

nb::list RunTimes(int64_t plan_id, int device) {
  const auto plan = ValueOrRaise(Registry::Global().Find(plan_id));
  std::shared_ptr<Executor> last;  // the most recently used is the first
  for (const auto& [owner, executor] : plan->programs()) {
    if (owner == device && !last) last = executor;
  }
  if (!last) Raise(FailedPrecondition("the plan has no program for device ", device));
  std::vector<CommandTime> times;
  {
    nb::gil_scoped_release nogil;  // the run that is waited for may want it
    times = ValueOrRaise(last->Times());
  }
  nb::list shown;
  for (const CommandTime& t : times) {
    const Command& c = last->program().commands[t.command];
    nb::dict entry;
    entry["operator"] = c.name;
    entry["kind"] = NameOf(c.kind);
    entry["stream"] = c.stream;
    entry["device"] = Computes(c) ? 0 : c.target;
    entry["bytes"] = BytesMoved(c);
    entry["begin_us"] = t.begin_us;
    entry["end_us"] = t.end_us;
    shown.append(entry);
  }
  return shown;
}

nb::dict CaptureInfo(int64_t id) {
  const auto capture = ValueOrRaise(Captures::Global().Find(id));
  const cuda::Driver* driver = ValueOrRaise(cuda::Driver::Get());
  nb::list nodes;
  for (const cuda::NodeInfo& n : ValueOrRaise(cuda::ListNodes(*driver, capture->graph.get()))) {
    nb::dict node;
    node["type"] = n.type;
    if (std::string_view(n.type) == "kernel") {
      node["kernel"] = n.kernel;
      node["grid"] = nb::make_tuple(n.grid[0], n.grid[1], n.grid[2]);
      node["block"] = nb::make_tuple(n.block[0], n.block[1], n.block[2]);
      node["shared_bytes"] = n.shared_bytes;
    }
    nodes.append(node);
  }
  nb::dict info;
  info["inputs"] = capture->inputs;
  info["outputs"] = capture->outputs;
  info["nodes"] = nodes;
  return info;
}

// DLPack's DLManagedTensor, with its shape behind it.
struct ManagedTensor {
  nb::dlpack::dltensor tensor;
  void* context = nullptr;
  void (*deleter)(ManagedTensor*) = [](ManagedTensor* self) { delete self; };
  std::vector<int64_t> shape;
};

// Memory that somebody else owns, in the form that frameworks exchange. XLA lets go of it on threads of its
// own, at times while the interpreter finishes, when whoever asks for the GIL is ended: so nothing here is
// Python's.
nb::object DlpackCapsule(uint64_t address, std::vector<int64_t> shape, uint8_t dtype_code, uint8_t dtype_bits,
                         int device_type, int device_id) {
  auto managed = std::make_unique<ManagedTensor>();
  managed->shape = std::move(shape);
  managed->tensor = {.data = reinterpret_cast<void*>(address),
                     .device = {device_type, device_id},
                     .ndim = static_cast<int32_t>(managed->shape.size()),
                     .dtype = {dtype_code, dtype_bits, 1},
                     .shape = managed->shape.data()};
  PyObject* capsule = PyCapsule_New(managed.get(), "dltensor", [](PyObject* self) {
    // Whoever takes the tensor renames the capsule, and calls the deleter.
    if (!PyCapsule_IsValid(self, "dltensor")) return;
    auto* unused = static_cast<ManagedTensor*>(PyCapsule_GetPointer(self, "dltensor"));
    unused->deleter(unused);
  });
  if (!capsule) nb::raise_python_error();
  managed.release();
  return nb::steal(capsule);
}

nb::list Handlers(const std::string& platform) {
  nb::list handlers;
  const auto capsule = [](auto* handler) {
    return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
  };
  const auto add = [&](const char* name, auto* execute, auto*... instantiate) {
    nb::dict stages;
    stages["execute"] = capsule(execute);
    ((stages["instantiate"] = capsule(instantiate)), ...);
    handlers.append(nb::make_tuple(name, stages));
  };
  if (platform == "cpu") {
    add("dynaflow_dispatch", DynaflowDispatchHost, DynaflowFindHost);
    add("dynaflow_copy", DynaflowCopyHost);
  } else {
    add("dynaflow_dispatch", DynaflowDispatchCuda, DynaflowFindCuda);
    add("dynaflow_copy", DynaflowCopyCuda);
    add("dynaflow_capture_begin", DynaflowCaptureBegin);
    add("dynaflow_capture_end", DynaflowCaptureEnd);
  }
  return handlers;
}

template <typename Callee>
nb::tuple TypeOf(const char* name) {
  nb::dict type;
  type["type_id"] = nb::capsule(&Callee::id);
  type["type_info"] = nb::capsule(&Callee::info);
  return nb::make_tuple(name, type);
}

nb::tuple CalleeType(const std::string& platform) {
  return platform == "cpu" ? TypeOf<HostCallee>("dynaflow_callee") : TypeOf<CudaCallee>("dynaflow_callee");
}

// Programs hold threads and Python functions, which must go while there is an interpreter.
void Shutdown() {
  nb::gil_scoped_release nogil;
  Registry::Global().Clear();
  Captures::Global().Clear();
}

}  // namespace

NB_MODULE(_dispatch, m) {
  m.doc() = "The executor of dispatched plans; xla_ffi/README.md describes it.";
  m.attr("PROGRAM_VERSION") = kProgramVersion;
  nb::exception<DispatchError>(m, "DispatchError", PyExc_RuntimeError);

  m.def("callee_type", &CalleeType, "platform"_a,
        "The type of what a compiled call of a plan keeps, as (name, what JAX registers), for \"cpu\" or "
        "\"CUDA\"; XLA has to know it before the handlers.");
  m.def("handlers", &Handlers, "platform"_a, "The FFI handlers, as (target name, capsules by stage).");
  m.def(
      "check_program", [](const nb::bytes& blob, bool order) { DecodeChecked(blob, order); }, "program"_a,
      "order_overlaps"_a = false, "Raises what is wrong with a program, if anything.");
  m.def(
      "order_overlaps",
      [](const nb::bytes& blob) {
        const std::string bytes = Encode(DecodeChecked(blob, /*order_overlaps=*/true));
        return nb::bytes(bytes.data(), bytes.size());
      },
      "program"_a, "The program with the events that its overlapping accesses need.");

  m.def("create_plan", &CreatePlan, "on_miss"_a.none() = nb::none(), "capacity"_a = 4, "participants"_a = 1,
        "timeout_s"_a = kDefaultTimeout, "across"_a = false,
        "A new plan without programs, which `participants` devices call together in every run. "
        "on_miss([(device, "
        "input_addresses, output_addresses), ...]) gets all calls of a run that no programs fit, and is to "
        "add one "
        "for each.");
  m.def(
      "free_plan",
      [](int64_t id) {
        nb::gil_scoped_release nogil;
        Raise(Registry::Global().Free(id));
      },
      "plan"_a, "Frees a plan; runs under way finish first.");
  m.def(
      "forget_programs",
      [](int64_t id) {
        nb::gil_scoped_release nogil;
        ValueOrRaise(Registry::Global().Find(id))->Forget();
      },
      "plan"_a, "Forgets a plan's programs, so that the next call is a miss; runs under way finish first.");
  m.def(
      "set_peers", &SetPeers, "plan"_a, "own"_a, "others"_a, "timeout_s"_a,
      "keep_alive"_a.none() = nb::none(),
      "Says which other processes take part in a plan: `own` is the address of what this one tells them, and "
      "`others` has a name, a pidfd and the address of what it tells for each of them.");
  m.def("plan_stats", &PlanStats, "plan"_a);
  m.def("add_host_program", &AddHostProgram, "plan"_a, "device"_a, "program"_a, "partitions"_a,
        "order_overlaps"_a = false, "timed"_a = false, "processes"_a = std::vector<int>(),
        "keep_alive"_a.none() = nb::none(),
        "Adds a program whose partitions are Python functions without arguments.");
  m.def("add_cuda_program", &AddCudaProgram, "plan"_a, "devices"_a, "program"_a, "order_overlaps"_a = false,
        "one_graph"_a = true, "blocking"_a = false, "timed"_a = false, "keep_alive"_a.none() = nb::none(),
        "Adds a program whose partitions are captures, by id.");
  m.def("run_times", &RunTimes, "plan"_a, "device"_a,
        "When the commands of a timed program's last run ran, once it is over: a list of dicts with the "
        "operator, the kind (launch, copy, signal, await, sum), the stream, the device that a copy writes to "
        "or a flag is shared with, bytes, and begin_us and end_us from the start of the run.");
  m.def("run_host", &RunHost, "plan"_a, "device"_a, "inputs"_a, "outputs"_a, "run_id"_a = 0,
        "Runs a host plan without XLA, on memory at these addresses.");

  m.def(
      "expect_capture", [](int64_t id) { Raise(Captures::Global().Expect(id)); }, "id"_a,
      "Says that the next capture to begin is this one.");
  m.def("capture_info", &CaptureInfo, "id"_a, "Addresses and nodes of a finished capture.");
  m.def(
      "free_capture", [](int64_t id) { Raise(Captures::Global().Free(id)); }, "id"_a,
      "Forgets a capture; ends one that is still open.");
  m.def("dlpack_capsule", &DlpackCapsule, "address"_a, "shape"_a, "dtype_code"_a, "dtype_bits"_a,
        "device_type"_a, "device_id"_a,
        "A DLPack capsule over memory at an address, which must outlive what is made of it.");

  m.def(
      "cuda_unavailable_because", [] { return cuda::Driver::Get().status().message(); },
      "Why there is no CUDA; empty if there is.");
  m.def(
      "cuda_sm_count",
      [](int device) { return ValueOrRaise(cuda::SmCount(*ValueOrRaise(cuda::Driver::Get()), device)); },
      "device"_a);
  m.def(
      "cuda_allocate_shared",
      [](int device, size_t bytes) {
        const cuda::Driver* driver = ValueOrRaise(cuda::Driver::Get());
        const cuda::SharedBlock block = ValueOrRaise(cuda::AllocateShared(*driver, device, bytes));
        return nb::make_tuple(block.address, nb::bytes(block.handle.reserved, sizeof(block.handle.reserved)));
      },
      "device"_a, "bytes"_a,
      "Zeroed memory for as long as the process: its address, and a handle for others.");
  m.def(
      "cuda_clear_shared",
      [](int device, uint64_t address, size_t bytes) {
        Raise(cuda::ClearShared(*ValueOrRaise(cuda::Driver::Get()), device, address, bytes));
      },
      "device"_a, "address"_a, "bytes"_a, "Makes shared memory zero again.");
  m.def(
      "cuda_open_shared",
      [](int device, const nb::bytes& handle) {
        return ValueOrRaise(cuda::OpenShared(*ValueOrRaise(cuda::Driver::Get()), device, View(handle)));
      },
      "device"_a, "handle"_a, "The address at which a device reaches another process's shared memory.");

  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&Shutdown));
}

}  // namespace dynaflow
