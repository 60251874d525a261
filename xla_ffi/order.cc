#include "xla_ffi/order.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

namespace dynaflow {
namespace {

// Vector clocks, grown command by command in program order.
class Clocks {
 public:
  Clocks(size_t num_streams, size_t num_events)
      : now_(num_streams, std::vector<uint32_t>(num_streams)), events_(num_events) {}

  // What is finished before the next command of `stream` starts, that stream's own commands included.
  const std::vector<uint32_t>& At(uint32_t stream) const { return now_[stream]; }

  void Merge(uint32_t stream, const std::vector<uint32_t>& other) {
    for (size_t i = 0; i < other.size(); ++i) now_[stream][i] = std::max(now_[stream][i], other[i]);
  }

  // To be called once per command, in program order. A wait counts as finished when its event is.
  void Step(const Command& c) {
    if (c.kind == CommandKind::kWait) Merge(c.stream, events_[c.target]);
    ++now_[c.stream][c.stream];
    if (c.kind == CommandKind::kRecord) events_[c.target] = now_[c.stream];
  }

 private:
  std::vector<std::vector<uint32_t>> now_;     // per stream
  std::vector<std::vector<uint32_t>> events_;  // per event, once recorded
};

// The one name of bytes that have several.
Range Canonical(const Program& p, Range r) {
  if (r.space == Space::kOutput && p.outputs[r.index].address) {
    return {Space::kMemory, 0, p.outputs[r.index].address + r.offset, r.bytes};
  }
  if (r.space == Space::kOutput && p.outputs[r.index].donor >= 0) {
    r.space = Space::kInput;
    r.index = static_cast<uint32_t>(p.outputs[r.index].donor);
  }
  if (r.space == Space::kInput && p.inputs[r.index].kind == InputKind::kPinned) {
    r.offset += p.inputs[r.index].address;
    r.space = Space::kMemory;
    r.index = 0;
  }
  return r;
}

struct Access {
  Range range;
  size_t command;
  bool write;
};

std::vector<Access> SortedAccesses(const Program& p) {
  std::vector<Access> all;
  for (size_t i = 0; i < p.commands.size(); ++i) {
    for (const Range& r : p.commands[i].reads) {
      if (r.bytes != 0) all.push_back({Canonical(p, r), i, false});
    }
    for (const Range& r : p.commands[i].writes) {
      if (r.bytes != 0) all.push_back({Canonical(p, r), i, true});
    }
  }
  std::sort(all.begin(), all.end(), [](const Access& a, const Access& b) {
    return std::tie(a.range.space, a.range.index, a.range.offset) <
           std::tie(b.range.space, b.range.index, b.range.offset);
  });
  return all;
}

std::string Show(const Range& r) {
  switch (r.space) {
    case Space::kMemory: {
      char hex[2 * sizeof(r.offset)];
      const char* end = std::to_chars(std::begin(hex), std::end(hex), r.offset, 16).ptr;
      return StrCat(r.bytes, " bytes at 0x", std::string_view(hex, end - hex));
    }
    case Space::kInput:
      return StrCat(r.bytes, " bytes of input ", r.index);
    case Space::kOutput:
      return StrCat(r.bytes, " bytes of output ", r.index);
  }
  return {};
}

// XLA's callers keep their inputs: only a donated one may be written.
Status CheckInputsKept(const Program& p) {
  std::vector<bool> donated(p.inputs.size());
  for (const Output& out : p.outputs) {
    if (out.donor >= 0) donated[out.donor] = true;
  }
  struct Pinned {
    uint64_t begin, end;
    size_t input;
  };
  std::vector<Pinned> pinned;
  for (size_t i = 0; i < p.inputs.size(); ++i) {
    const Input& in = p.inputs[i];
    if (in.kind == InputKind::kPinned && !donated[i])
      pinned.push_back({in.address, in.address + in.bytes, i});
  }
  for (size_t i = 0; i < p.commands.size(); ++i) {
    for (const Range& raw : p.commands[i].writes) {
      const Range r = Canonical(p, raw);
      if (r.bytes == 0) continue;
      if (r.space == Space::kInput && !donated[r.index]) {
        return InvalidArgument(Describe(p, i), " writes input ", r.index, ", which is not donated");
      }
      if (r.space != Space::kMemory) continue;
      for (const Pinned& in : pinned) {
        if (r.offset < in.end && in.begin < r.offset + r.bytes) {
          return InvalidArgument(Describe(p, i), " writes pinned input ", in.input, ", which is not donated");
        }
      }
    }
  }
  return {};
}

// Who touched which bytes last. A command has to be ordered against these only: whoever came before them is
// ordered against them in turn, or has been found not to be.
class LastAccesses {
 public:
  explicit LastAccesses(const Program& p) : program_(p) {}

  // The earlier commands that a command meets, in program order, each once. To be called once per command, in
  // program order.
  std::vector<size_t> Meet(size_t command) {
    std::set<size_t> met;
    const Command& c = program_.commands[command];
    for (const Range& r : c.reads) Read(Canonical(program_, r), command, met);
    for (const Range& r : c.writes) Write(Canonical(program_, r), command, met);
    met.erase(command);
    return {met.begin(), met.end()};
  }

 private:
  // Bytes that have the same history.
  struct Stretch {
    uint64_t end;
    std::optional<size_t> writer;
    std::vector<size_t> readers;  // since then, the last of each stream
  };
  using Stretches = std::map<uint64_t, Stretch>;  // by where they begin; none overlap

  static void CutAt(Stretches& all, uint64_t at) {
    const auto after = all.upper_bound(at);
    if (after == all.begin()) return;
    auto& [begin, stretch] = *std::prev(after);
    if (begin == at || stretch.end <= at) return;
    Stretch rest = stretch;
    stretch.end = at;
    all.emplace_hint(after, at, std::move(rest));
  }

  // The stretches of a space, cut at both ends of a range.
  Stretches& CutAround(const Range& r) {
    Stretches& all = spaces_[{r.space, r.index}];
    CutAt(all, r.offset);
    CutAt(all, r.offset + r.bytes);
    return all;
  }

  void Read(const Range& r, size_t command, std::set<size_t>& met) {
    if (r.bytes == 0) return;
    Stretches& all = CutAround(r);
    const uint64_t end = r.offset + r.bytes;
    auto it = all.lower_bound(r.offset);
    for (uint64_t at = r.offset; at < end; at = it->second.end, ++it) {
      const uint64_t next = it == all.end() ? end : std::min(it->first, end);
      if (at < next)
        it = all.emplace_hint(it, at, Stretch{next, std::nullopt, {}});  // touched for the first time
      if (it->second.writer) met.insert(*it->second.writer);
      SetLastReader(it->second.readers, command);
    }
  }

  void SetLastReader(std::vector<size_t>& readers, size_t command) {
    const uint32_t stream = program_.commands[command].stream;
    for (size_t& reader : readers) {
      if (program_.commands[reader].stream != stream) continue;
      reader = command;
      return;
    }
    readers.push_back(command);
  }

  void Write(const Range& r, size_t command, std::set<size_t>& met) {
    if (r.bytes == 0) return;
    Stretches& all = CutAround(r);
    const auto first = all.lower_bound(r.offset), last = all.lower_bound(r.offset + r.bytes);
    for (auto it = first; it != last; ++it) {
      if (it->second.writer) met.insert(*it->second.writer);
      met.insert(it->second.readers.begin(), it->second.readers.end());
    }
    all.erase(first, last);
    all.emplace_hint(last, r.offset, Stretch{r.offset + r.bytes, command, {}});
  }

  const Program& program_;
  std::map<std::pair<Space, uint32_t>, Stretches> spaces_;
};

// The bytes that two commands have in common.
Range CommonBytes(const Program& p, size_t first, size_t second) {
  Program both;
  both.inputs = p.inputs;
  both.outputs = p.outputs;
  both.commands = {p.commands[first], p.commands[second]};
  return FindConflicts(both).at(0).bytes;
}

// Whether a copy's rows, from and to ranges of one space, are the same bytes or none in common.
bool IsOrderly(const Command& c, const Range& from, const Range& to) {
  if (from.offset + from.bytes <= to.offset || to.offset + to.bytes <= from.offset) return true;
  if (from == to) return true;
  const uint64_t pitch = c.rows.read_pitch, row = RowBytes(c);
  if (c.rows.count == 1 || c.rows.write_pitch != pitch) return false;
  // Rows may lie between rows.
  const uint64_t apart = (std::max(from.offset, to.offset) - std::min(from.offset, to.offset)) % pitch;
  return apart >= row && pitch - apart >= row;
}

// Nothing says in which order a copy goes over its bytes.
Status CheckCopies(const Program& p) {
  for (size_t i = 0; i < p.commands.size(); ++i) {
    const Command& c = p.commands[i];
    if (c.kind != CommandKind::kCopy || c.writes[0].bytes == 0) continue;
    const Range from = Canonical(p, c.reads[0]), to = Canonical(p, c.writes[0]);
    if (from.space != to.space || from.index != to.index || IsOrderly(c, from, to)) continue;
    return InvalidArgument(Describe(p, i), " copies ", Show(from), " to where a part of them is");
  }
  return {};
}

// What is wrong with commands by themselves.
Status CheckEach(const Program& p) {
  const auto where = [&] { return StrCat("program '", p.name, "'"); };
  DYNAFLOW_RETURN_IF_ERROR(CheckCopies(p).Within(where));
  return CheckInputsKept(p).Within(where);
}

}  // namespace

Order::Order(const Program& p) : num_streams_(p.streams.size()) {
  Clocks clocks(num_streams_, p.num_events);
  clocks_.reserve(p.commands.size() * num_streams_);
  for (const Command& c : p.commands) {
    stream_.push_back(c.stream);
    position_.push_back(clocks.At(c.stream)[c.stream]);
    clocks_.insert(clocks_.end(), clocks.At(c.stream).begin(), clocks.At(c.stream).end());
    clocks.Step(c);
  }
}

std::vector<Conflict> FindConflicts(const Program& p) {
  // A sweep over addresses: an access meets those that began before it and have not ended. Readers never meet
  // readers, so weights that everyone reads cost nothing.
  std::set<std::pair<size_t, size_t>> seen;
  std::vector<Conflict> conflicts;
  std::vector<const Access*> readers, writers;
  const std::vector<Access> accesses = SortedAccesses(p);
  for (const Access& now : accesses) {
    auto meet = [&](std::vector<const Access*>& open) {
      std::erase_if(open, [&](const Access* a) {
        return a->range.space != now.range.space || a->range.index != now.range.index ||
               a->range.offset + a->range.bytes <= now.range.offset;
      });
      for (const Access* a : open) {
        if (a->command == now.command) continue;
        const auto [first, second] = std::minmax(a->command, now.command);
        if (!seen.emplace(first, second).second) continue;
        Range common = now.range;
        common.bytes =
            std::min(a->range.offset + a->range.bytes, now.range.offset + now.range.bytes) - common.offset;
        conflicts.push_back({first, second, common});
      }
    };
    meet(writers);
    if (now.write) meet(readers);
    (now.write ? writers : readers).push_back(&now);
  }
  std::sort(conflicts.begin(), conflicts.end(), [](const Conflict& a, const Conflict& b) {
    return std::tie(a.second, a.first) < std::tie(b.second, b.first);
  });
  return conflicts;
}

Status CheckOverlap(const Program& p) {
  DYNAFLOW_RETURN_IF_ERROR(CheckEach(p));
  const Order order(p);
  LastAccesses last(p);
  for (size_t second = 0; second < p.commands.size(); ++second) {
    for (size_t first : last.Meet(second)) {
      if (order.Ordered(first, second)) continue;
      return InvalidArgument("program '", p.name, "': ", Describe(p, first), " on stream ",
                             p.commands[first].stream, " and ", Describe(p, second), " on stream ",
                             p.commands[second].stream, " both touch ", Show(CommonBytes(p, first, second)),
                             " and nothing orders them");
    }
  }
  return {};
}

Result<size_t> OrderOverlaps(Program& p) {
  DYNAFLOW_RETURN_IF_ERROR(CheckEach(p));
  // Walk in program order with the clocks of what has been ordered so far. A command that meets a command of
  // another stream which is not yet before it gets a wait; the latest of that stream stands for the earlier
  // ones.
  LastAccesses last(p);
  const size_t n = p.commands.size();
  Clocks clocks(p.streams.size(), p.num_events);
  std::vector<uint32_t> position(n);            // of each command, counted without the commands added here
  std::vector<std::vector<uint32_t>> after(n);  // the clock just after each command
  std::map<size_t, uint32_t> event_after;       // command -> the event to record after it
  std::vector<std::vector<size_t>> waits(n);    // command -> the commands to wait for before it
  size_t added = 0;
  for (size_t i = 0; i < n; ++i) {
    const Command& c = p.commands[i];
    std::vector<size_t> latest_first = last.Meet(i);
    std::reverse(latest_first.begin(), latest_first.end());
    for (size_t first : latest_first) {
      const uint32_t stream = p.commands[first].stream;
      if (clocks.At(c.stream)[stream] > position[first]) continue;
      clocks.Merge(c.stream, after[first]);
      waits[i].push_back(first);
      if (event_after.emplace(first, p.num_events + added).second) ++added;
    }
    position[i] = clocks.At(c.stream)[c.stream];
    clocks.Step(c);
    after[i] = clocks.At(c.stream);
  }
  if (added == 0) return added;

  std::vector<Command> commands;
  commands.reserve(n + 2 * added);
  auto add_event = [&](CommandKind kind, const Command& beside, uint32_t event) {
    Command added_event;
    added_event.kind = kind;
    added_event.stream = beside.stream;
    added_event.name = beside.name;
    added_event.target = event;
    commands.push_back(std::move(added_event));
  };
  for (size_t i = 0; i < n; ++i) {
    for (size_t first : waits[i]) add_event(CommandKind::kWait, p.commands[i], event_after.at(first));
    commands.push_back(std::move(p.commands[i]));
    if (auto it = event_after.find(i); it != event_after.end()) {
      add_event(CommandKind::kRecord, commands.back(), it->second);
    }
  }
  p.commands = std::move(commands);
  p.num_events += static_cast<uint32_t>(added);
  return added;
}

}  // namespace dynaflow
