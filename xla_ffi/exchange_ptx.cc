#include "xla_ffi/exchange_ptx.h"

#include <string_view>

namespace dynaflow::cuda {
namespace {

// Thread i does its one flag when its group's turn comes: kinds[i] is twice the group, and one more for an
// await. Flags are shared with other devices, so all accesses are at the scope of the system. What a signal
// stands for was written by kernels and copies before this node, or read by them; the fence makes the flag
// come after it.
constexpr char kFlags[] = R"(
.visible .entry dynaflow_flags(
  .param .align 8 .b8 addresses[256],
  .param .align 4 .b8 kinds[128],
  .param .u32 groups
)
.maxntid 32, 1, 1
{
  .reg .pred %is_await, %is_other, %is_unset, %is_more;
  .reg .b32 %thread, %kind, %groups, %own, %await, %group, %value;
  .reg .b64 %at, %offset, %flag;
  mov.u32 %thread, %tid.x;
  mov.b64 %at, addresses;
  mul.wide.u32 %offset, %thread, 8;
  add.s64 %at, %at, %offset;
  ld.param.u64 %flag, [%at];
  mov.b64 %at, kinds;
  mul.wide.u32 %offset, %thread, 4;
  add.s64 %at, %at, %offset;
  ld.param.u32 %kind, [%at];
  ld.param.u32 %groups, [groups];
  shr.u32 %own, %kind, 1;
  and.b32 %await, %kind, 1;
  setp.ne.u32 %is_await, %await, 0;
  mov.u32 %group, 0;
turn:
  setp.ne.u32 %is_other, %own, %group;
  @%is_other bra next;
  @%is_await bra wait;
  fence.acq_rel.sys;
  st.relaxed.sys.global.u32 [%flag], 1;
  bra next;
wait:
  ld.acquire.sys.global.u32 %value, [%flag];
  setp.eq.u32 %is_unset, %value, 0;
  @%is_unset bra wait;
  st.relaxed.sys.global.u32 [%flag], 0;
next:
  bar.warp.sync 0xffffffff;
  add.u32 %group, %group, 1;
  setp.lt.u32 %is_more, %group, %groups;
  @%is_more bra turn;
  ret;
}
)";

// Every block of a sum awaits the flags, so that none has to wait for another block; the first one signals.
// The last block that has seen them clears them: who that is, a counter tells, which goes back to zero by
// itself; its answer is on its way while the block adds. All sums of a device share it, since they follow
// one another.
//
// Signals are threads of the first warp and awaits of the second, so that no thread that waits can keep one
// from signalling. The barrier hands on to all threads what those that waited have acquired.
constexpr char kSumGlobals[] = R"(
.global .align 4 .u32 dynaflow_sums_begun = 0;
)";
constexpr char kSumParams[] = R"(
  .param .u64 total,
  .param .u64 bytes,
  .param .align 8 .b8 parts[128],
  .param .u32 num_parts,
  .param .align 8 .b8 signals[256],
  .param .u32 num_signals,
  .param .align 8 .b8 awaits[256],
  .param .u32 num_awaits)";
constexpr char kNormParams[] = R"(,
  .param .u64 residual,
  .param .u64 weight,
  .param .u64 normed,
  .param .u32 pieces,
  .param .f32 inverse_width,
  .param .f32 epsilon,
  .param .u32 wide_weight,
  .param .u32 rounds_scale,
  .param .u32 rounds_normed)";
// Of a row, a thread has up to four pieces of 16 bytes: %x are their words.
//
// %a are numbers under way, %w and %v the words that they are read from and written as.
constexpr char kSumFlags[] = R"(
{
  .shared .align 4 .b8 squares_of_warps[64];
  .reg .pred %p, %q;
  .reg .b32 %thread, %threads, %block, %blocks, %index, %n, %value, %bit, %begun, %w<4>, %v<4>, %x<16>;
  .reg .f32 %a<8>, %b<8>, %y, %squares, %scale;
  .reg .b64 %at, %flag, %place, %step, %bytes, %part, %pitch, %row;
  mov.u32 %thread, %tid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %block, %ctaid.x;
  mov.u32 %blocks, %nctaid.x;
  ld.param.u64 %bytes, [bytes];
  shr.u32 %n, %thread, 5;
  setp.eq.u32 %p, %n, 1;
  @%p bra wait;
  setp.ne.u32 %p, %block, 0;
  @%p bra ready;
  ld.param.u32 %n, [num_signals];
  setp.ge.u32 %p, %thread, %n;
  @%p bra ready;
  mov.b64 %at, signals;
  mul.wide.u32 %part, %thread, 8;
  add.s64 %at, %at, %part;
  ld.param.u64 %flag, [%at];
  fence.acq_rel.sys;
  st.relaxed.sys.global.u32 [%flag], 1;
  bra ready;
wait:
  sub.u32 %index, %thread, 32;
  ld.param.u32 %n, [num_awaits];
  setp.eq.u32 %p, %n, 0;
  @%p bra ready;
  setp.ge.u32 %p, %index, %n;
  @%p bra seen;
  mov.b64 %at, awaits;
  mul.wide.u32 %part, %index, 8;
  add.s64 %at, %at, %part;
  ld.param.u64 %flag, [%at];
spin:
  ld.acquire.sys.global.u32 %value, [%flag];
  setp.eq.u32 %p, %value, 0;
  @%p bra spin;
seen:
  bar.warp.sync 0xffffffff;
  setp.ne.u32 %p, %index, 0;
  @%p bra ready;
  sub.u32 %value, %blocks, 1;
  mov.b64 %at, dynaflow_sums_begun;
  atom.relaxed.gpu.global.inc.u32 %begun, [%at], %value;
ready:
  bar.sync 0;
)";
constexpr char kSumEnd[] = R"(
through:
  setp.ne.u32 %p, %thread, 32;
  @%p ret;
  ld.param.u32 %n, [num_awaits];
  setp.eq.u32 %p, %n, 0;
  @%p ret;
  sub.u32 %value, %blocks, 1;
  setp.ne.u32 %p, %begun, %value;
  @%p ret;
  mov.b64 %at, awaits;
clear:
  ld.param.u64 %flag, [%at];
  st.relaxed.sys.global.u32 [%flag], 0;
  add.s64 %at, %at, 8;
  sub.u32 %n, %n, 1;
  setp.ne.u32 %p, %n, 0;
  @%p bra clear;
  ret;
}
)";

// At %place in what the parameter, or %at, points to.
std::string Load(char words, std::string_view from) {
  return StrCat("  ld.param.u64 %part, [", from, "];\n  add.s64 %part, %part, %place;\n  ld.global.v4.b32 {%",
                words, "0, %", words, "1, %", words, "2, %", words, "3}, [%part];\n");
}

std::string Store(std::string_view to) {
  return StrCat("  ld.param.u64 %part, [", to,
                "];\n  add.s64 %part, %part, %place;\n  st.global.v4.b32 [%part], {%w0, %w1, %w2, %w3};\n");
}

// Where the thread's k-th piece of its row is, unless it has none.
std::string Piece(unsigned k, std::string_view otherwise) {
  return StrCat("  ld.param.u32 %n, [pieces];\n  mad.lo.u32 %index, %threads, ", k,
                ", %thread;\n  setp.ge.u32 %p, %index, %n;\n  @%p bra ", otherwise,
                ";\n  mul.wide.u32 %place, %index, 16;\n");
}

// Goes to the label if a parameter, a number or an address, is zero.
std::string UnlessGiven(std::string_view parameter, std::string_view label, bool address) {
  const auto *bits = address ? "64" : "32", *into = address ? "%part" : "%n";
  return StrCat("  ld.param.u", bits, " ", into, ", [", parameter, "];\n  setp.eq.u", bits, " %p, ", into,
                ", 0;\n  @%p bra ", label, ";\n");
}

// Adds up %squares over the lanes of a warp, for all of them.
std::string OverLanes() {
  std::string text;
  for (int lanes = 16; lanes; lanes /= 2) {
    text += StrCat("  mov.b32 %value, %squares;\n  shfl.sync.bfly.b32 %bit, %value, ", lanes,
                   ", 31, 0xffffffff;\n  mov.b32 %y, %bit;\n  add.rn.f32 %squares, %squares, %y;\n");
  }
  return text;
}

// The two kernels for sums of one kind of element.
class SumText {
 public:
  SumText(Element element, bool converts) : wide_(element == Element::kFloat32), converts_(converts) {}

  // Blocks take turns at pieces.
  std::string Sums() const {
    return StrCat(R"(
  mul.lo.u32 %value, %blocks, %threads;
  mul.wide.u32 %step, %value, 16;
  mad.lo.u32 %value, %block, %threads, %thread;
  mul.wide.u32 %place, %value, 16;
next:
  setp.ge.u64 %p, %place, %bytes;
  @%p bra through;
)",
                  Add(""), Pack(), Store("total"), "  add.s64 %place, %place, %step;\n  bra next;\n");
  }

  // Blocks take turns at rows: what was added is kept, and multiplied with the scale of its row when that is
  // known. The order of additions is the same on every device.
  std::string SumsAndNorms() const {
    std::string text = R"(
  ld.param.u32 %n, [pieces];
  mul.wide.u32 %pitch, %n, 16;
  cvt.u64.u32 %row, %block;
  mul.lo.s64 %row, %row, %pitch;
row:
  setp.ge.u64 %p, %row, %bytes;
  @%p bra through;
  mov.f32 %squares, 0f00000000;
)";
    for (unsigned k = 0; k < kMaxRowPieces; ++k) {
      const std::string alone = StrCat("alone_", k);
      text +=
          StrCat(Piece(k, "added"), "  add.s64 %place, %place, %row;\n", Add(StrCat("_", k)), Pack(),
                 UnlessGiven("residual", alone, /*address=*/true), Unpack('w', 'a'), Load('v', "residual"),
                 AddWords('v'), Pack(), alone, ":\n", Store("total"), Unpack('w', 'a'));
      for (int i = 0; i < Numbers(); ++i) {
        text += StrCat("  fma.rn.f32 %squares, %a", i, ", %a", i, ", %squares;\n");
      }
      for (unsigned i = 0; i < 4; ++i) text += StrCat("  mov.b32 %x", 4 * k + i, ", %w", i, ";\n");
    }
    text += StrCat("added:\n", OverLanes(), R"(
  and.b32 %index, %thread, 31;
  setp.ne.u32 %p, %index, 0;
  shr.u32 %value, %thread, 5;
  shl.b32 %value, %value, 2;
  mov.u32 %bit, squares_of_warps;
  add.u32 %value, %value, %bit;
  @!%p st.shared.f32 [%value], %squares;
  bar.sync 0;
  shr.u32 %n, %threads, 5;
  setp.lt.u32 %p, %index, %n;
  shl.b32 %value, %index, 2;
  add.u32 %value, %value, %bit;
  mov.f32 %squares, 0f00000000;
  @%p ld.shared.f32 %squares, [%value];
)",
                   OverLanes(), R"(
  bar.sync 0;
  ld.param.f32 %y, [inverse_width];
  ld.param.f32 %scale, [epsilon];
  mul.rn.f32 %squares, %squares, %y;
  add.rn.f32 %squares, %squares, %scale;
  rsqrt.approx.f32 %scale, %squares;
)",
                   UnlessGiven("rounds_scale", "scaled", /*address=*/false), Round("%scale"), "scaled:\n");
    for (unsigned k = 0; k < kMaxRowPieces; ++k) {
      const std::string normed = StrCat("normed_", k), weighed = StrCat("weighed_", k);
      text += StrCat(Piece(k, "done"), Unpack('x', 'a', 4 * k));
      for (int i = 0; i < Numbers(); ++i) text += StrCat("  mul.rn.f32 %a", i, ", %a", i, ", %scale;\n");
      text += StrCat(UnlessGiven("rounds_normed", normed, /*address=*/false), Pack(), Unpack('w', 'a'),
                     normed, ":\n", UnlessGiven("weight", weighed, /*address=*/true), Weights(k));
      for (int i = 0; i < Numbers(); ++i) text += StrCat("  mul.rn.f32 %a", i, ", %a", i, ", %b", i, ";\n");
      text += StrCat(weighed, ":\n", Pack(), "  add.s64 %place, %place, %row;\n", Store("normed"));
    }
    return StrCat(text, R"(done:
  cvt.u64.u32 %step, %blocks;
  mul.lo.s64 %step, %step, %pitch;
  add.s64 %row, %row, %step;
  bra row;
)");
  }

 private:
  int Numbers() const { return wide_ ? 4 : 8; }  // in a piece

  // The bits of each number in four words from %WORDS<first> on.
  template <typename Take>
  std::string Each(char words, unsigned first, Take take) const {
    std::string text;
    for (unsigned i = 0; i < 4; ++i) {
      const std::string word = StrCat("%", words, first + i);
      if (wide_) {
        text += take(i, word);
      } else {
        text += StrCat("  shl.b32 %value, ", word, ", 16;\n", take(2 * i, "%value"), "  and.b32 %value, ",
                       word, ", 0xffff0000;\n", take(2 * i + 1, "%value"));
      }
    }
    return text;
  }

  // Numbers %INTO0 ... of the words.
  std::string Unpack(char words, char into, unsigned first = 0) const {
    return Each(words, first, [&](unsigned k, std::string_view bits) {
      return StrCat("  mov.b32 %", into, k, ", ", bits, ";\n");
    });
  }

  // The numbers of the words, added to %a.
  std::string AddWords(char words) const {
    return Each(words, 0, [](unsigned k, std::string_view bits) {
      return StrCat("  mov.b32 %y, ", bits, ";\n  add.rn.f32 %a", k, ", %a", k, ", %y;\n");
    });
  }

  // A number as the element has it: to the nearest, of two the even one, and what is none stays none.
  std::string Round(std::string_view number) const {
    if (wide_) return {};
    if (converts_) {
      return StrCat("  cvt.rn.bf16x2.f32 %value, ", number, ", ", number,
                    ";\n  and.b32 %value, %value, 0xffff0000;\n  mov.b32 ", number, ", %value;\n");
    }
    return StrCat("  mov.b32 %value, ", number, ";\n  bfe.u32 %bit, %value, 16, 1;\n",
                  "  add.u32 %value, %value, %bit;\n  add.u32 %value, %value, 0x7fff;\n",
                  "  setp.nan.f32 %q, ", number, ", ", number, ";\n  @%q mov.b32 %value, 0x7fff0000;\n",
                  "  and.b32 %value, %value, 0xffff0000;\n  mov.b32 ", number, ", %value;\n");
  }

  // Words %w of the numbers %a, rounded.
  std::string Pack() const {
    std::string text;
    for (int i = 0; i < 4; ++i) {
      const std::string low = StrCat("%a", wide_ ? i : 2 * i), high = StrCat("%a", 2 * i + 1);
      if (wide_) {
        text += StrCat("  mov.b32 %w", i, ", ", low, ";\n");
      } else if (converts_) {
        text += StrCat("  cvt.rn.bf16x2.f32 %w", i, ", ", high, ", ", low, ";\n");
      } else {
        text += StrCat(Round(low), Round(high), "  mov.b32 %value, ", low, ";\n  mov.b32 %bit, ", high,
                       ";\n  prmt.b32 %w", i, ", %value, %bit, 0x7632;\n");
      }
    }
    return text;
  }

  // The numbers %a of what all parts have at %place, added; `label` makes labels of its own of it.
  std::string Add(std::string_view label) const {
    return StrCat(
        "  mov.b64 %at, parts;\n", Load('w', "%at"), "  add.s64 %at, %at, 8;\n", Load('v', "%at"),
        Unpack('w', 'a'), AddWords('v'), "  ld.param.u32 %n, [num_parts];\n  sub.u32 %n, %n, 2;\nmore", label,
        ":\n  setp.eq.u32 %p, %n, 0;\n  @%p bra all", label, ";\n  add.s64 %at, %at, 8;\n", Load('v', "%at"),
        AddWords('v'), "  sub.u32 %n, %n, 1;\n  bra more", label, ";\nall", label, ":\n");
  }

  // The numbers %b of the weights of the k-th piece, which is at %place of a row.
  std::string Weights(unsigned k) const {
    const std::string own = StrCat(Load('v', "weight"), Unpack('v', 'b'));
    if (wide_) return own;
    return StrCat(UnlessGiven("wide_weight", StrCat("narrow_", k), /*address=*/false),
                  "  ld.param.u64 %part, [weight];\n  add.s64 %part, %part, %place;\n",
                  "  add.s64 %part, %part, %place;\n  ld.global.v4.f32 {%b0, %b1, %b2, %b3}, [%part];\n",
                  "  ld.global.v4.f32 {%b4, %b5, %b6, %b7}, [%part + 16];\n  bra weigh_", k, ";\nnarrow_", k,
                  ":\n", own, "weigh_", k, ":\n");
  }

  const bool wide_;      // float32
  const bool converts_;  // whether the device has conversions to bfloat16
};

}  // namespace

std::string SumKernel(Element element, bool with_norm) {
  return StrCat("dynaflow_sum_", with_norm ? "and_norm_" : "",
                element == Element::kFloat32 ? "float32" : "bfloat16");
}

std::string ExchangePtx(int major) {
  const bool converts = major >= 8;
  std::string text = StrCat(converts ? ".version 7.0\n.target sm_80" : ".version 6.0\n.target sm_70",
                            "\n.address_size 64\n", kFlags, kSumGlobals);
  for (Element element : {Element::kFloat32, Element::kBFloat16}) {
    const SumText sum(element, converts);
    text += StrCat(".visible .entry ", SumKernel(element, false), "(", kSumParams,
                   "\n)\n.maxntid 512, 1, 1\n.minnctapersm 4", kSumFlags, sum.Sums(), kSumEnd);
    text += StrCat(".visible .entry ", SumKernel(element, true), "(", kSumParams, kNormParams,
                   "\n)\n.maxntid 512, 1, 1\n.minnctapersm 2", kSumFlags, sum.SumsAndNorms(), kSumEnd);
  }
  return text;
}

}  // namespace dynaflow::cuda
