#include "xla_ffi/exchange_ptx.h"

#include <string_view>

namespace dynaflow::cuda {
namespace {

// Thread i does its one flag when its group's turn comes: kinds[i] is twice the group, and one more for an
// await. Flags are shared with other devices, so all accesses are at the scope of the system. What a signal
// stands for was written by kernels and copies before this node, or read by them; the fence makes the flag
// come after it.
constexpr char kFlags[] = R"(
.version 6.0
.target sm_70
.address_size 64
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

int PerPiece(Element element) { return element == Element::kFloat32 ? 4 : 8; }

// Numbers %INTO0 ... of four words from %WORDS<first> on, or these added to them.
std::string Unpack(Element element, char words, char into, bool adds = false, unsigned first = 0) {
  std::string text;
  const auto take = [&](unsigned k, const std::string& bits) {
    text += StrCat("  mov.b32 %", adds ? "y" : StrCat(into, k), ", ", bits, ";\n");
    if (adds) text += StrCat("  add.rn.f32 %", into, k, ", %", into, k, ", %y;\n");
  };
  for (unsigned i = 0; i < 4; ++i) {
    const std::string word = StrCat("%", words, first + i);
    if (element == Element::kFloat32) {
      take(i, word);
    } else {
      text += StrCat("  shl.b32 %value, ", word, ", 16;\n");
      take(2 * i, "%value");
      text += StrCat("  and.b32 %value, ", word, ", 0xffff0000;\n");
      take(2 * i + 1, "%value");
    }
  }
  return text;
}

// A number as the element has it. The conversion to bfloat16 came with later devices than the rest needs: to
// the nearest, of two the even one, and no number stays none.
std::string Round(Element element, std::string_view number) {
  if (element == Element::kFloat32) return {};
  return StrCat("  mov.b32 %value, ", number, ";\n  bfe.u32 %bit, %value, 16, 1;\n",
                "  add.u32 %value, %value, %bit;\n  add.u32 %value, %value, 0x7fff;\n", "  setp.nan.f32 %q, ",
                number, ", ", number, ";\n  @%q mov.b32 %value, 0x7fff0000;\n",
                "  and.b32 %value, %value, 0xffff0000;\n  mov.b32 ", number, ", %value;\n");
}

std::string RoundAll(Element element, char numbers) {
  std::string text;
  for (int k = 0; k < PerPiece(element); ++k) text += Round(element, StrCat("%", numbers, k));
  return text;
}

// Words %w of numbers that are rounded.
std::string Pack(Element element, char numbers) {
  std::string text;
  for (int i = 0; i < 4; ++i) {
    if (element == Element::kFloat32) {
      text += StrCat("  mov.b32 %w", i, ", %", numbers, i, ";\n");
    } else {
      text += StrCat("  mov.b32 %value, %", numbers, 2 * i, ";\n  mov.b32 %bit, %", numbers, 2 * i + 1,
                     ";\n  prmt.b32 %w", i, ", %value, %bit, 0x7632;\n");
    }
  }
  return text;
}

// At %place in what the parameter, or %at, points to.
std::string Load(char words, std::string_view from = {}) {
  return StrCat("  ld.param.u64 %part, [", from.empty() ? "%at" : from,
                "];\n  add.s64 %part, %part, %place;\n  ld.global.v4.b32 {%", words, "0, %", words, "1, %",
                words, "2, %", words, "3}, [%part];\n");
}

std::string Store(std::string_view to) {
  return StrCat("  ld.param.u64 %part, [", to,
                "];\n  add.s64 %part, %part, %place;\n  st.global.v4.b32 [%part], {%w0, %w1, %w2, %w3};\n");
}

// The numbers %a of what all parts have at %place, added; `label` makes labels of its own of it.
std::string Add(Element element, std::string_view label) {
  return StrCat("  mov.b64 %at, parts;\n", Load('w'), "  add.s64 %at, %at, 8;\n", Load('v'),
                Unpack(element, 'w', 'a'), Unpack(element, 'v', 'a', /*adds=*/true),
                "  ld.param.u32 %n, [num_parts];\n  sub.u32 %n, %n, 2;\nmore", label,
                ":\n  setp.eq.u32 %p, %n, 0;\n  @%p bra all", label, ";\n  add.s64 %at, %at, 8;\n", Load('v'),
                Unpack(element, 'v', 'a', /*adds=*/true), "  sub.u32 %n, %n, 1;\n  bra more", label, ";\nall",
                label, ":\n", RoundAll(element, 'a'));
}

// Blocks take turns at pieces.
std::string Sums(Element element) {
  return StrCat(R"(
  mul.lo.u32 %value, %blocks, %threads;
  mul.wide.u32 %step, %value, 16;
  mad.lo.u32 %value, %block, %threads, %thread;
  mul.wide.u32 %place, %value, 16;
next:
  setp.ge.u64 %p, %place, %bytes;
  @%p bra through;
)",
                Add(element, ""), Pack(element, 'a'), Store("total"),
                "  add.s64 %place, %place, %step;\n  bra next;\n");
}

// Whether the thread has no k-th piece of the row, or where that is.
std::string Piece(unsigned k, std::string_view otherwise) {
  return StrCat("  mad.lo.u32 %index, %threads, ", k, ", %thread;\n  setp.ge.u32 %p, %index, %n;\n",
                "  @%p bra ", otherwise, ";\n  mul.wide.u32 %place, %index, 16;\n");
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

// Blocks take turns at rows: what was added is kept, and multiplied with the scale of its row when that is
// known. The order of additions is the same on every device.
std::string SumsAndNorms(Element element) {
  const int per_piece = PerPiece(element);
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
    text += StrCat("  ld.param.u32 %n, [pieces];\n", Piece(k, "added"), "  add.s64 %place, %place, %row;\n",
                   Add(element, StrCat("_", k)),
                   "  ld.param.u64 %part, [residual];\n  setp.eq.u64 %p, %part, 0;\n  @%p bra alone_", k,
                   ";\n", Load('v', "residual"), Unpack(element, 'v', 'a', /*adds=*/true),
                   RoundAll(element, 'a'), "alone_", k, ":\n", Pack(element, 'a'), Store("total"));
    for (unsigned i = 0; i < 4; ++i) text += StrCat("  mov.b32 %x", 4 * k + i, ", %w", i, ";\n");
    for (int i = 0; i < per_piece; ++i) {
      text += StrCat("  fma.rn.f32 %squares, %a", i, ", %a", i, ", %squares;\n");
    }
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
  ld.param.u32 %n, [rounds_scale];
  setp.eq.u32 %p, %n, 0;
  @%p bra scaled;
)",
                 Round(element, "%scale"), "scaled:\n");
  for (unsigned k = 0; k < kMaxRowPieces; ++k) {
    text += StrCat("  ld.param.u32 %n, [pieces];\n", Piece(k, "done"),
                   Unpack(element, 'x', 'a', /*adds=*/false, 4 * k));
    for (int i = 0; i < per_piece; ++i) text += StrCat("  mul.rn.f32 %a", i, ", %a", i, ", %scale;\n");
    text += StrCat("  ld.param.u32 %n, [rounds_normed];\n  setp.eq.u32 %p, %n, 0;\n  @%p bra normed_", k,
                   ";\n", RoundAll(element, 'a'), "normed_", k,
                   ":\n  ld.param.u64 %part, [weight];\n  setp.eq.u64 %p, %part, 0;\n  @%p bra weighed_", k,
                   ";\n");
    const std::string narrow = StrCat(Load('v', "weight"), Unpack(element, 'v', 'b'));
    if (element == Element::kFloat32) {
      text += narrow;
    } else {
      text += StrCat("  ld.param.u32 %n, [wide_weight];\n  setp.eq.u32 %p, %n, 0;\n  @%p bra narrow_", k,
                     ";\n  add.s64 %part, %part, %place;\n  add.s64 %part, %part, %place;\n",
                     "  ld.global.v4.f32 {%b0, %b1, %b2, %b3}, [%part];\n",
                     "  ld.global.v4.f32 {%b4, %b5, %b6, %b7}, [%part + 16];\n  bra weigh_", k, ";\nnarrow_",
                     k, ":\n", narrow, "weigh_", k, ":\n");
    }
    for (int i = 0; i < per_piece; ++i) text += StrCat("  mul.rn.f32 %a", i, ", %a", i, ", %b", i, ";\n");
    text += StrCat("weighed_", k, ":\n", RoundAll(element, 'a'), Pack(element, 'a'),
                   "  add.s64 %place, %place, %row;\n", Store("normed"));
  }
  return StrCat(text, R"(done:
  cvt.u64.u32 %step, %blocks;
  mul.lo.s64 %step, %step, %pitch;
  add.s64 %row, %row, %step;
  bra row;
)");
}

}  // namespace

std::string SumKernel(Element element, bool with_norm) {
  return StrCat("dynaflow_sum_", with_norm ? "and_norm_" : "",
                element == Element::kFloat32 ? "float32" : "bfloat16");
}

std::string ExchangePtx() {
  std::string text = StrCat(kFlags, kSumGlobals);
  for (Element element : {Element::kFloat32, Element::kBFloat16}) {
    text += StrCat(".visible .entry ", SumKernel(element, false), "(", kSumParams,
                   "\n)\n.maxntid 512, 1, 1\n.minnctapersm 4", kSumFlags, Sums(element), kSumEnd);
    text += StrCat(".visible .entry ", SumKernel(element, true), "(", kSumParams, kNormParams,
                   "\n)\n.maxntid 512, 1, 1\n.minnctapersm 2", kSumFlags, SumsAndNorms(element), kSumEnd);
  }
  return text;
}

}  // namespace dynaflow::cuda
