#include "xla_ffi/program.h"

#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

namespace dynaflow {
namespace {

static_assert(std::endian::native == std::endian::little,
              "programs are little-endian; a big-endian host must swap");

constexpr std::string_view kMagic = "DYNAFLOW";

// What the bytes say of a norm's weights.
enum class WeightKind : uint8_t { kNone = 0, kFloat32 = 1, kBFloat16 = 2 };

// Appends fields in the order in which Reader takes them.
class Writer {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_integral_v<T> || std::is_enum_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void PutString(std::string_view s) {
    Put<uint32_t>(s.size());
    bytes_.append(s);
  }
  template <typename T, typename PutOne>
  void PutList(const std::vector<T>& list, PutOne put_one) {
    Put<uint32_t>(list.size());
    for (const T& item : list) put_one(item);
  }
  void PutRange(const Range& r) {
    Put(r.space);
    Put(r.index);
    Put(r.offset);
    Put(r.bytes);
  }
  void PutRaw(std::string_view s) { bytes_.append(s); }
  std::string Take() && { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Whether Python can show the text, which errors quote: UTF-8 in its shortest form, without surrogates, and
// without the zero that would end the error there.
bool IsText(std::string_view text) {
  constexpr uint32_t kFirst[] = {0, 0x80, 0x800, 0x10000};  // that takes one byte more
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<uint8_t>(text[i++]);
    const int more = std::countl_one(lead) - (lead >= 0x80);  // 0 to 3
    if (lead == 0 || lead >= 0xF8 || (lead & 0xC0) == 0x80 || text.size() - i < static_cast<size_t>(more))
      return false;
    uint32_t code = more == 0 ? lead : lead & (0x3Fu >> more);
    for (int k = 0; k < more; ++k) {
      const auto next = static_cast<uint8_t>(text[i++]);
      if ((next & 0xC0) != 0x80) return false;
      code = code << 6 | (next & 0x3F);
    }
    if (code < kFirst[more] || (code >= 0xD800 && code < 0xE000) || code > 0x10FFFF) return false;
  }
  return true;
}

// Takes fields one by one. The first failure sticks, and every later field reads as zero, so that decoding
// code needs one check at the end of each list instead of one at each field.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes), size_(bytes.size()) {}

  template <typename T>
  T Get(const char* field) {
    static_assert(std::is_integral_v<T>);
    T value{};
    if (std::string_view raw = Take(sizeof value, field); !raw.empty())
      std::memcpy(&value, raw.data(), sizeof value);
    return value;
  }

  // An enum whose values run from 0 to `last`.
  template <typename E>
  E GetEnum(const char* field, E last) {
    const auto value = Get<uint8_t>(field);
    if (value > static_cast<uint8_t>(last)) {
      Fail(StrCat(field, " is ", int{value}, ", not one of 0 to ", int{static_cast<uint8_t>(last)}));
      return E{};
    }
    return static_cast<E>(value);
  }

  bool GetBool(const char* field) {
    enum class Bool : uint8_t { kNo, kYes };
    return GetEnum(field, Bool::kYes) == Bool::kYes;
  }

  std::string GetString(const char* field) {
    const auto size = Get<uint32_t>(field);
    const std::string_view text = Take(size, field);
    if (!IsText(text)) {
      Fail(StrCat(field, " is no text in UTF-8"));
      return {};
    }
    return std::string(text);
  }

  // A list whose entries take at least `min_bytes` each, which bounds what a damaged count can make us
  // allocate.
  template <typename T, typename GetOne>
  std::vector<T> GetList(const char* field, size_t min_bytes, GetOne get_one) {
    std::vector<T> list;
    const auto count = Get<uint32_t>(field);
    if (count > rest_.size() / min_bytes) {
      Fail(StrCat("truncated: ", field, " counts ", count, ", more than the ", rest_.size(),
                  " bytes left can hold"));
      return list;
    }
    list.reserve(count);
    for (uint32_t i = 0; i < count && status_.ok(); ++i) list.push_back(get_one());
    return list;
  }

  Range GetRange() {
    Range r;
    r.space = GetEnum("range space", Space::kOutput);
    r.index = Get<uint32_t>("range index");
    r.offset = Get<uint64_t>("range offset");
    r.bytes = Get<uint64_t>("range size");
    return r;
  }
  std::vector<Range> GetRanges(const char* field) {
    return GetList<Range>(field, kRangeBytes, [this] { return GetRange(); });
  }

  std::string_view Take(size_t count, const char* field) {
    if (!status_.ok()) return {};
    if (count > rest_.size()) {
      Fail(StrCat("truncated at byte ", size_ - rest_.size(), " of ", size_, ", in ", field));
      return {};
    }
    std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }

  void Fail(std::string why) {
    if (status_.ok()) status_ = Status(Code::kInvalidArgument, std::move(why));
  }
  const Status& status() const { return status_; }
  size_t left() const { return rest_.size(); }

  static constexpr size_t kRangeBytes = 1 + 4 + 8 + 8;

 private:
  std::string_view rest_;
  const size_t size_;
  Status status_;
};

std::optional<Norm> GetNorm(Reader& in) {
  Norm norm;
  norm.width = in.Get<uint32_t>("norm width");
  if (norm.width == 0) return std::nullopt;
  norm.epsilon = std::bit_cast<float>(in.Get<uint32_t>("norm epsilon"));
  norm.residual = in.GetBool("norm residual");
  const auto weight = in.GetEnum("norm weight", WeightKind::kBFloat16);
  if (weight == WeightKind::kFloat32) norm.weight = Element::kFloat32;
  if (weight == WeightKind::kBFloat16) norm.weight = Element::kBFloat16;
  norm.rounds_scale = in.GetBool("norm rounds_scale");
  norm.rounds_normed = in.GetBool("norm rounds_normed");
  return norm;
}

Command GetCommand(Reader& in) {
  Command c;
  c.kind = in.GetEnum("command kind", CommandKind::kSum);
  c.stream = in.Get<uint32_t>("command stream");
  c.name = in.GetString("operator name");
  c.target = in.Get<uint32_t>("command target");
  c.reads = in.GetRanges("reads");
  c.writes = in.GetRanges("writes");
  if (c.kind == CommandKind::kCopy) {
    c.rows.count = in.Get<uint32_t>("copy rows");
    c.rows.read_pitch = in.Get<uint64_t>("copy read pitch");
    c.rows.write_pitch = in.Get<uint64_t>("copy write pitch");
  }
  if (c.kind == CommandKind::kSum) {
    c.element = in.GetEnum("sum element", Element::kBFloat16);
    c.norm = GetNorm(in);
  }
  return c;
}

constexpr size_t kMinCommandBytes = 1 + 4 + 4 + 4 + 4 + 4;

Result<Program> DecodeUnchecked(std::string_view bytes) {
  Reader in(bytes);
  if (const std::string_view magic = in.Take(kMagic.size(), "magic"); in.status().ok() && magic != kMagic) {
    return InvalidArgument("bad magic: this is no program");
  }
  if (const auto version = in.Get<uint32_t>("version"); in.status().ok() && version != kProgramVersion) {
    return InvalidArgument("version ", version, ", but this library reads version ", kProgramVersion);
  }
  Program p;
  p.name = in.GetString("program name");
  p.num_devices = in.Get<uint32_t>("device count");
  p.num_events = in.Get<uint32_t>("event count");
  p.streams = in.GetList<Stream>("streams", 12, [&] {
    Stream s;
    s.device = in.Get<uint32_t>("stream device");
    s.priority = in.Get<int32_t>("stream priority");
    s.sm_budget = in.Get<uint32_t>("stream sm_budget");
    return s;
  });
  p.partitions = in.GetList<int64_t>("partitions", 8, [&] { return in.Get<int64_t>("partition id"); });
  p.inputs = in.GetList<Input>("inputs", 17, [&] {
    Input i;
    i.kind = in.GetEnum("input kind", InputKind::kPinned);
    i.address = in.Get<uint64_t>("input address");
    i.bytes = in.Get<uint64_t>("input size");
    return i;
  });
  p.outputs = in.GetList<Output>("outputs", 20, [&] {
    Output o;
    o.donor = in.Get<int32_t>("output donor");
    o.bytes = in.Get<uint64_t>("output size");
    o.address = in.Get<uint64_t>("output address");
    return o;
  });
  p.commands = in.GetList<Command>("commands", kMinCommandBytes, [&] { return GetCommand(in); });
  if (in.status().ok() && in.left() != 0) in.Fail(StrCat(in.left(), " bytes follow the last command"));
  DYNAFLOW_RETURN_IF_ERROR(in.status());
  return p;
}

Status CheckRange(const Program& p, const Range& r) {
  if (r.bytes > std::numeric_limits<uint64_t>::max() - r.offset) {
    return InvalidArgument("a range of ", r.bytes, " bytes at ", r.offset, " wraps around");
  }
  if (r.space == Space::kMemory) {
    if (r.index != 0) return InvalidArgument("an absolute range has index ", r.index, ", not 0");
    if (r.offset == 0 && r.bytes != 0) return InvalidArgument("a range at address 0");
    return {};
  }
  const bool input = r.space == Space::kInput;
  const char* what = input ? "input" : "output";
  const size_t count = input ? p.inputs.size() : p.outputs.size();
  if (r.index >= count) return InvalidArgument(what, " ", r.index, " of ", count);
  const uint64_t size = input ? p.inputs[r.index].bytes : p.outputs[r.index].bytes;
  if (r.offset + r.bytes > size) {
    return InvalidArgument("bytes ", r.offset, " to ", r.offset + r.bytes, " of ", what, " ", r.index,
                           ", which has ", size);
  }
  return {};
}

Status CheckFlag(const Program& p, const Command& c) {
  const bool signal = c.kind == CommandKind::kSignal;
  const char* what = signal ? "a signal" : "an await";
  if (c.target >= p.num_devices)
    return InvalidArgument(signal ? "signals device " : "awaits device ", c.target, " of ", p.num_devices);
  if (!c.reads.empty()) return InvalidArgument(what, " reads no memory");
  if (signal && c.writes.size() != 1)
    return InvalidArgument("a signal writes one range, its flag, not ", c.writes.size());
  if (c.writes.empty()) return InvalidArgument("an await writes its flag first, but writes nothing");
  for (const Range& r : c.writes) {
    // The peer that writes there knows nothing of this device's calls.
    if (r.space != Space::kMemory) return InvalidArgument(what, " writes absolute addresses only");
  }
  const Range& flag = c.writes[0];
  if (flag.bytes != kFlagBytes)
    return InvalidArgument("the flag has ", flag.bytes, " bytes, not ", kFlagBytes);
  if (flag.offset % kFlagBytes != 0)
    return InvalidArgument("the flag's address is no multiple of ", kFlagBytes);
  return {};
}

Status CheckRows(const Command& c) {
  const uint64_t read = c.reads[0].bytes, written = c.writes[0].bytes;
  if (c.rows.count == 0) return InvalidArgument("copies no rows");
  if (c.rows.count == 1) {
    return read == written ? Status() : InvalidArgument("copies ", read, " bytes into ", written);
  }
  const uint64_t steps = c.rows.count - 1;
  for (const auto& [bytes, pitch] :
       {std::pair(read, c.rows.read_pitch), std::pair(written, c.rows.write_pitch)}) {
    if (pitch > bytes / steps || bytes - steps * pitch == 0) {
      return InvalidArgument("copies ", c.rows.count, " rows that are ", pitch, " bytes apart within ",
                             bytes);
    }
    if (bytes - steps * pitch > pitch) {
      return InvalidArgument("copies rows of ", bytes - steps * pitch, " bytes that are ", pitch, " apart");
    }
  }
  if (read - steps * c.rows.read_pitch != written - steps * c.rows.write_pitch) {
    return InvalidArgument("copies rows of ", read - steps * c.rows.read_pitch, " bytes into rows of ",
                           written - steps * c.rows.write_pitch);
  }
  return {};
}

Status CheckSum(const Command& c) {
  const uint64_t bytes = c.writes.empty() ? 0 : c.writes[0].bytes;
  const size_t more = c.reads.size() - NumSummands(c), wanted = c.norm ? 2 : 1;
  if (c.reads.size() < 2 + more || c.reads.size() > kMaxSummands + more || c.writes.size() != wanted) {
    return InvalidArgument("a sum ", c.norm ? "with a norm " : "", "reads ", 2 + more, " to ",
                           kMaxSummands + more, " ranges and writes ", wanted, ", not ", c.reads.size(),
                           " and ", c.writes.size());
  }
  const bool weighs = c.norm && c.norm->weight;
  const uint64_t weights = weighs ? c.norm->width * BytesOf(*c.norm->weight) : 0;
  for (const auto* ranges : {&c.reads, &c.writes}) {
    for (const Range& r : *ranges) {
      if (r.space != Space::kMemory) return InvalidArgument("a sum is of absolute addresses only");
      const uint64_t own = weighs && &r == &c.reads.back() ? weights : bytes;
      if (r.bytes != own) return InvalidArgument("takes ", r.bytes, " bytes of a sum where it wants ", own);
      if (r.offset % kSumBytes != 0 || r.bytes % kSumBytes != 0)
        return InvalidArgument("the address or size of a summand is no multiple of ", kSumBytes);
    }
  }
  if (c.norm) {
    const uint64_t row = RowBytes(c, *c.norm);
    if (row % kSumBytes != 0 || row > kMaxRowBytes || bytes % row != 0)
      return InvalidArgument("the norm of rows of ", row, " bytes in ", bytes);
    if (weighs && c.norm->weight != c.element && c.norm->weight != Element::kFloat32)
      return InvalidArgument("a norm's weights are float32, or as the sum");
  }
  // Each element is read before its place is written, by the same thread.
  for (const Range& to : c.writes) {
    for (const auto* ranges : {&c.reads, &c.writes}) {
      for (const Range& r : *ranges) {
        const bool apart = r.offset >= to.offset + to.bytes || to.offset >= r.offset + r.bytes;
        const bool same = r.offset == to.offset && r.bytes == to.bytes;
        const bool is_weights = weighs && &r == &c.reads.back();  // which all threads read, at the end
        if (!apart && (!same || is_weights || (ranges == &c.writes && &r != &to)))
          return InvalidArgument("the sum takes the place of a part of a summand");
      }
    }
  }
  return {};
}

Status CheckCommand(const Program& p, const Command& c, std::vector<bool>& recorded) {
  if (c.stream >= p.streams.size()) return InvalidArgument("stream ", c.stream, " of ", p.streams.size());
  for (const auto* ranges : {&c.reads, &c.writes}) {
    for (const Range& r : *ranges) DYNAFLOW_RETURN_IF_ERROR(CheckRange(p, r));
  }
  switch (c.kind) {
    case CommandKind::kLaunch:
      if (c.target >= p.partitions.size())
        return InvalidArgument("partition ", c.target, " of ", p.partitions.size());
      return {};
    case CommandKind::kCopy:
      if (c.target >= p.num_devices)
        return InvalidArgument("copies to device ", c.target, " of ", p.num_devices);
      if (c.reads.size() != 1 || c.writes.size() != 1) {
        return InvalidArgument("a copy has one source and one destination, not ", c.reads.size(), " and ",
                               c.writes.size());
      }
      return CheckRows(c);
    case CommandKind::kRecord:
    case CommandKind::kWait:
      if (c.target >= p.num_events) return InvalidArgument("event ", c.target, " of ", p.num_events);
      if (!c.reads.empty() || !c.writes.empty()) return InvalidArgument("an event touches no memory");
      if (c.kind == CommandKind::kRecord) {
        if (recorded[c.target]) return InvalidArgument("records event ", c.target, " a second time");
        recorded[c.target] = true;
      } else if (!recorded[c.target]) {
        return InvalidArgument("waits for event ", c.target, ", which no earlier command records");
      }
      return {};
    case CommandKind::kSignal:
    case CommandKind::kAwait:
      return CheckFlag(p, c);
    case CommandKind::kSum:
      return CheckSum(c);
  }
  return InvalidArgument("command kind ", static_cast<int>(c.kind));
}

}  // namespace

Result<Program> Decode(std::string_view bytes) {
  auto program = DecodeUnchecked(bytes);
  if (!program.ok()) return program.status().Within([] { return std::string("program"); });
  DYNAFLOW_RETURN_IF_ERROR(Validate(*program));
  return program;
}

std::string Encode(const Program& p) {
  Writer out;
  out.PutRaw(kMagic);
  out.Put(kProgramVersion);
  out.PutString(p.name);
  out.Put(p.num_devices);
  out.Put(p.num_events);
  out.PutList(p.streams, [&](const Stream& s) {
    out.Put(s.device);
    out.Put(s.priority);
    out.Put(s.sm_budget);
  });
  out.PutList(p.partitions, [&](int64_t id) { out.Put(id); });
  out.PutList(p.inputs, [&](const Input& i) {
    out.Put(i.kind);
    out.Put(i.address);
    out.Put(i.bytes);
  });
  out.PutList(p.outputs, [&](const Output& o) {
    out.Put(o.donor);
    out.Put(o.bytes);
    out.Put(o.address);
  });
  out.PutList(p.commands, [&](const Command& c) {
    out.Put(c.kind);
    out.Put(c.stream);
    out.PutString(c.name);
    out.Put(c.target);
    out.PutList(c.reads, [&](const Range& r) { out.PutRange(r); });
    out.PutList(c.writes, [&](const Range& r) { out.PutRange(r); });
    if (c.kind == CommandKind::kCopy) {
      out.Put(c.rows.count);
      out.Put(c.rows.read_pitch);
      out.Put(c.rows.write_pitch);
    }
    if (c.kind != CommandKind::kSum) return;
    out.Put(c.element);
    out.Put<uint32_t>(c.norm ? c.norm->width : 0);
    if (!c.norm) return;
    out.Put(std::bit_cast<uint32_t>(c.norm->epsilon));
    out.Put<uint8_t>(c.norm->residual);
    out.Put(!c.norm->weight                       ? WeightKind::kNone
            : c.norm->weight == Element::kFloat32 ? WeightKind::kFloat32
                                                  : WeightKind::kBFloat16);
    out.Put<uint8_t>(c.norm->rounds_scale);
    out.Put<uint8_t>(c.norm->rounds_normed);
  });
  return std::move(out).Take();
}

Status Validate(const Program& p) {
  const std::string where = StrCat("program '", p.name, "'");
  if (p.num_devices == 0) return InvalidArgument(where, " has no device");
  if (p.num_devices > kMaxDevices) {
    return InvalidArgument(where, " spans ", p.num_devices, " devices; at most ", kMaxDevices,
                           " are allowed");
  }
  if (p.streams.size() > kMaxStreams) {
    return InvalidArgument(where, " has ", p.streams.size(), " streams; at most ", kMaxStreams,
                           " are allowed");
  }
  if (p.num_events > p.commands.size()) {
    return InvalidArgument(where, " has ", p.num_events, " events but only ", p.commands.size(), " commands");
  }
  for (size_t i = 0; i < p.streams.size(); ++i) {
    if (p.streams[i].device >= p.num_devices) {
      return InvalidArgument(where, ": stream ", i, " is on device ", p.streams[i].device, " of ",
                             p.num_devices);
    }
  }
  for (size_t i = 0; i < p.inputs.size(); ++i) {
    const Input& input = p.inputs[i];
    if (input.kind == InputKind::kPinned &&
        input.bytes > std::numeric_limits<uint64_t>::max() - input.address) {
      return InvalidArgument(where, ": pinned input ", i, " wraps around the address space");
    }
  }
  std::vector<bool> donated(p.inputs.size());
  for (size_t i = 0; i < p.outputs.size(); ++i) {
    const Output& out = p.outputs[i];
    if (out.bytes > std::numeric_limits<uint64_t>::max() - out.address) {
      return InvalidArgument(where, ": pinned output ", i, " wraps around the address space");
    }
    if (out.donor == -1) continue;
    if (out.donor < 0 || static_cast<size_t>(out.donor) >= p.inputs.size()) {
      return InvalidArgument(where, ": output ", i, " takes the memory of input ", out.donor, " of ",
                             p.inputs.size());
    }
    const Input& donor = p.inputs[out.donor];
    if (donor.bytes != out.bytes) {
      return InvalidArgument(where, ": output ", i, " has ", out.bytes, " bytes, its donor, input ",
                             out.donor, ", has ", donor.bytes);
    }
    if (donated[out.donor]) return InvalidArgument(where, ": input ", out.donor, " is donated twice");
    if (out.address && (donor.kind != InputKind::kPinned || donor.address != out.address)) {
      return InvalidArgument(where, ": pinned output ", i, " does not lie in its donor, input ", out.donor);
    }
    donated[out.donor] = true;
  }
  std::vector<bool> recorded(p.num_events);
  for (size_t i = 0; i < p.commands.size(); ++i) {
    DYNAFLOW_RETURN_IF_ERROR(
        CheckCommand(p, p.commands[i], recorded).Within([&] { return StrCat(where, ", ", Describe(p, i)); }));
  }
  return {};
}

std::string Describe(const Program& p, size_t command) {
  return StrCat("operator '", p.commands[command].name, "' (command ", command, ")");
}

}  // namespace dynaflow
