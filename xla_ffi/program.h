// A program: what one call of a plan does, as a flat list of commands on streams.
//
// A program is plain data. It is decoded from bytes that the Python side wrote (README.md has the format) and
// validated once; whoever holds a Program may index with anything in it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "xla_ffi/status.h"

namespace dynaflow {

// Where an address counts from.
enum class Space : uint8_t {
  kMemory = 0,  // an absolute address: the private pool, a pinned input or a pinned output
  kInput = 1,   // the call's input `index`
  kOutput = 2,  // the call's output `index`
};

// Bytes that an operator reads or writes.
struct Range {
  Space space = Space::kMemory;
  uint32_t index = 0;   // of the input or output; 0 in kMemory
  uint64_t offset = 0;  // from the start of the input or output; the address itself in kMemory
  uint64_t bytes = 0;

  bool operator==(const Range&) const = default;
};

// In-order queue of work. Work on different streams is unordered unless events order it.
struct Stream {
  uint32_t device = 0;     // index into the program's devices
  int32_t priority = 0;    // CUDA's: lower runs first
  uint32_t sm_budget = 0;  // how many SMs the stream may use; 0: all

  bool operator==(const Stream&) const = default;
};

enum class InputKind : uint8_t {
  kMoving = 0,  // its address may differ from call to call
  kPinned = 1,  // partitions read it in place: the program holds for one address only
};

struct Input {
  InputKind kind = InputKind::kMoving;
  uint64_t address = 0;  // of a pinned input
  uint64_t bytes = 0;

  bool operator==(const Input&) const = default;
};

struct Output {
  int32_t donor = -1;  // the input whose memory XLA gives to this output (donation), or -1
  uint64_t bytes = 0;
  uint64_t address =
      0;  // where partitions write it in place: the program holds for one address only; 0: anywhere

  bool operator==(const Output&) const = default;
};

enum class CommandKind : uint8_t {
  kLaunch = 0,
  kCopy = 1,
  kRecord = 2,
  kWait = 3,
  kSignal =
      4,       // sets a flag in a device's memory once all before it on its stream is done, and visible there
  kAwait = 5,  // waits until a flag of the own memory is set, and clears it
  kSum = 6,    // adds, element by element and in their order, in float32, and rounds once
};

// What a sum is of.
enum class Element : uint8_t { kFloat32 = 0, kBFloat16 = 1 };
inline constexpr size_t kNumElements = 2;

// A copy of several rows, whose starts are `read_pitch` bytes apart at the source and `write_pitch` at the
// destination. The command's ranges reach from the first byte of the first row to the last byte of the last.
struct Rows {
  uint32_t count = 1;
  uint64_t read_pitch = 0;
  uint64_t write_pitch = 0;

  bool operator==(const Rows&) const = default;
};

// What a sum goes on to: the RMS norm of its rows, with a residual added to them before, as behind the
// all-reduces of a transformer. In float32, each result rounded once, unless it says more.
struct Norm {
  uint32_t width = 0;  // elements in a row
  float epsilon = 0;   // added to the mean square
  bool residual = false;
  std::optional<Element> weight;  // of each column, if there are weights: float32, or as the sum
  bool rounds_scale = false;      // before rows are multiplied with it
  bool rounds_normed = false;     // before they are multiplied with the weights

  bool operator==(const Norm&) const = default;
};

struct Command {
  CommandKind kind = CommandKind::kLaunch;
  uint32_t stream = 0;
  std::string name;  // the operator, for whoever reads an error

  // kLaunch: the partition; kRecord, kWait: the event; kCopy, kSignal: the device whose memory it writes;
  // kAwait: the device that sets the flag.
  uint32_t target = 0;
  std::vector<Range> reads;   // kCopy: exactly the source; kSum: what to add, also in peers' memory, and
                              // then the norm's residual and weights
  std::vector<Range> writes;  // kCopy: exactly the destination; kSignal: the flag; kAwait: the flag, and then
                              // what peers have written by the time it is set; kSum: the sum, with the
                              // residual in it, and then the norm
  Rows rows;                  // kCopy only
  Element element = Element::kFloat32;  // kSum only
  std::optional<Norm> norm;             // kSum only

  bool operator==(const Command&) const = default;
};

// Bytes in each row of a copy that has been validated.
inline uint64_t RowBytes(const Command& c) {
  return c.reads[0].bytes - (c.rows.count - 1) * c.rows.read_pitch;
}

inline uint64_t BytesOf(Element element) { return element == Element::kFloat32 ? 4 : 2; }
// How many of its reads a sum adds.
inline size_t NumSummands(const Command& c) {
  return c.reads.size() - (c.norm && c.norm->residual) - (c.norm && c.norm->weight);
}
inline uint64_t RowBytes(const Command& sum, const Norm& norm) { return norm.width * BytesOf(sum.element); }

// Whether the command is about the order of others only, and touches no memory.
inline bool IsEvent(const Command& c) {
  return c.kind == CommandKind::kRecord || c.kind == CommandKind::kWait;
}
inline bool IsSum(const Command& c) { return c.kind == CommandKind::kSum; }
// Whether the command computes: it has a use for a multiprocessor.
inline bool Computes(const Command& c) { return c.kind == CommandKind::kLaunch || IsSum(c); }
// Whether the command is about a flag.
inline bool IsFlag(const Command& c) {
  return c.kind == CommandKind::kSignal || c.kind == CommandKind::kAwait;
}

struct Program {
  std::string name;
  uint32_t num_devices = 1;
  uint32_t num_events = 0;
  std::vector<Stream> streams;
  std::vector<int64_t> partitions;  // CUDA: the id of each one's capture; host: free for the caller to use
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  std::vector<Command> commands;

  bool operator==(const Program&) const = default;
};

inline constexpr uint32_t kProgramVersion = 6;
inline constexpr uint64_t kFlagBytes = 4;
inline constexpr uint64_t kSumBytes = 16;  // of which size and addresses of a sum are multiples
inline constexpr size_t kMaxSummands = 16;
inline constexpr uint64_t kMaxRowBytes = 32768;  // of a norm
inline constexpr uint32_t kMaxDevices = 1024;    // of one host, and more than any has
inline constexpr uint32_t kMaxStreams = 64;      // a host stream is a thread

// Fails with the field at fault for any bytes that Encode would not have written.
Result<Program> Decode(std::string_view bytes);
std::string Encode(const Program& program);

// What Decode checks beyond the format. In particular, an event is recorded once, and earlier in the list
// than any wait for it: of the programs that pass, only one that awaits a flag can wait forever.
Status Validate(const Program& program);

// The command's "operator 'attention' (command 3)".
std::string Describe(const Program& program, size_t command);

}  // namespace dynaflow
