#include "xla_ffi/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <random>

#include "xla_ffi/tests/programs.h"

namespace dynaflow {
namespace {

using ::testing::HasSubstr;

TEST(Decode, GivesBackWhatWasEncoded) {
  const Program p = FullProgram();
  auto decoded = Decode(Encode(p));
  ASSERT_TRUE(decoded.ok()) << decoded.status().message();
  EXPECT_EQ(*decoded, p);
}

TEST(Decode, TakesAnEmptyProgram) { EXPECT_TRUE(Decode(Encode(ProgramBuilder(0))).ok()); }

TEST(Decode, RefusesForeignBytes) {
  EXPECT_THAT(Decode("").status().message(), HasSubstr("truncated at byte 0 of 0, in magic"));
  EXPECT_THAT(Decode("GARBAGE!and more").status().message(), HasSubstr("bad magic"));
}

TEST(Decode, RefusesAnotherVersion) {
  std::string bytes = Encode(FullProgram());
  bytes[8] = 9;
  EXPECT_THAT(Decode(bytes).status().message(),
              HasSubstr(StrCat("version 9, but this library reads version ", kProgramVersion)));
}

TEST(Decode, RefusesEveryTruncation) {
  const std::string bytes = Encode(FullProgram());
  for (size_t size = 0; size < bytes.size(); ++size) {
    const auto decoded = Decode(std::string_view(bytes).substr(0, size));
    ASSERT_FALSE(decoded.ok()) << "cut at " << size;
    EXPECT_THAT(decoded.status().message(), HasSubstr("truncated")) << "cut at " << size;
  }
}

TEST(Decode, RefusesTrailingBytes) {
  EXPECT_THAT(Decode(Encode(FullProgram()) + "x").status().message(),
              HasSubstr("1 bytes follow the last command"));
}

TEST(Decode, RefusesAHugeCountWithoutAllocatingIt) {
  std::string bytes = Encode(ProgramBuilder(0));
  // The command count is the last field of an empty program.
  bytes.replace(bytes.size() - 4, 4, "\xff\xff\xff\xff");
  EXPECT_THAT(Decode(bytes).status().message(), HasSubstr("commands counts 4294967295"));
}

// Errors quote names, and Python decodes errors.
TEST(Decode, RefusesNamesThatAreNoText) {
  using namespace std::string_literals;
  for (const std::string& name : std::vector<std::string>{
           "a\0b"s, "\x80"s, "a\xc3"s, "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80", "\xf0\x80\x80\xaf",
           "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80", "\xff", "\xc3("}) {
    Program p = FullProgram();
    p.name = name;
    EXPECT_THAT(Decode(Encode(p)).status().message(), HasSubstr("program name is no text in UTF-8"));
    p = FullProgram();
    p.commands[0].name = name;
    EXPECT_THAT(Decode(Encode(p)).status().message(), HasSubstr("operator name is no text in UTF-8"));
  }
  for (const char* name :
       {"", "plain", "l\xc3\xa4yer", "\xe6\xbc\x94", "\xf0\x9f\x98\x80", "\xf4\x8f\xbf\xbf"}) {
    Program p = FullProgram();
    p.name = name;
    EXPECT_TRUE(Decode(Encode(p)).ok()) << name;
  }
}

// Damage to one field, and what the error has to say about it.
struct Damage {
  const char* says;
  std::function<void(Program&)> inflict;
};

TEST(Decode, NamesTheFieldAtFault) {
  constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
  const Damage damages[] = {
      {"has no device", [](Program& p) { p.num_devices = 0; }},
      {"spans 1025 devices; at most 1024", [](Program& p) { p.num_devices = 1025; }},
      {"spans 4294967295 devices", [](Program& p) { p.num_devices = 0xffffffff; }},
      {"stream 1 is on device 3 of 1", [](Program& p) { p.streams[1].device = 3; }},
      {"65 streams; at most 64", [](Program& p) { p.streams.resize(65); }},
      {"has 99 events but only 13 commands", [](Program& p) { p.num_events = 99; }},
      {"operator 'attention' (command 2): stream 2 of 2", [](Program& p) { p.commands[2].stream = 2; }},
      {"operator 'attention' (command 2): partition 7 of 2", [](Program& p) { p.commands[2].target = 7; }},
      {"command 1): event 5 of 2", [](Program& p) { p.commands[1].target = 5; }},
      {"command 5): records event 0 a second time", [](Program& p) { p.commands[5].target = 0; }},
      {"command 3): waits for event 1, which no earlier", [](Program& p) { p.commands[3].target = 1; }},
      {"an event touches no memory", [](Program& p) { p.commands[1].reads = {Memory(0x8000, 1)}; }},
      {"operator 'input' (command 0): copies to device 1 of 1", [](Program& p) { p.commands[0].target = 1; }},
      {"one source and one destination, not 0 and 1", [](Program& p) { p.commands[0].reads.clear(); }},
      {"copies 63 bytes into 64", [](Program& p) { p.commands[0].reads[0].bytes = 63; }},
      {"bytes 1 to 65 of input 0, which has 64", [](Program& p) { p.commands[0].reads[0].offset = 1; }},
      {"input 3 of 3", [](Program& p) { p.commands[0].reads[0].index = 3; }},
      {"output 3 of 3", [](Program& p) { p.commands[7].writes[0].index = 3; }},
      {"wraps around", [](Program& p) { p.commands[2].reads[0].offset = kMax; }},
      {"a range at address 0", [](Program& p) { p.commands[2].reads[0].offset = 0; }},
      {"has index 1, not 0", [](Program& p) { p.commands[2].reads[0].index = 1; }},
      {"pinned input 1 wraps around", [](Program& p) { p.inputs[1].bytes = kMax; }},
      {"output 1 takes the memory of input 5 of 3", [](Program& p) { p.outputs[1].donor = 5; }},
      {"output 1 takes the memory of input -2 of 3", [](Program& p) { p.outputs[1].donor = -2; }},
      {"output 1 has 32 bytes, its donor, input 0, has 64", [](Program& p) { p.outputs[1].donor = 0; }},
      {"input 2 is donated twice", [](Program& p) { p.outputs[0] = {2, 32}; }},
      {"pinned output 2 wraps around", [](Program& p) { p.outputs[2].bytes = kMax; }},
      {"pinned output 1 does not lie in its donor, input 2",
       [](Program& p) { p.outputs[1].address = 0x3000; }},
      {"pinned output 2 does not lie in its donor, input 1",
       [](Program& p) { p.outputs[2] = {1, 128, 0x3000}; }},
      {"operator 'send' (command 8): signals device 1 of 1", [](Program& p) { p.commands[8].target = 1; }},
      {"operator 'receive' (command 9): awaits device 2 of 1", [](Program& p) { p.commands[9].target = 2; }},
      {"command 8): a signal reads no memory", [](Program& p) { p.commands[8].reads = {Memory(0x8000, 1)}; }},
      {"command 9): an await reads no memory", [](Program& p) { p.commands[9].reads = {Memory(0x8000, 1)}; }},
      {"command 8): a signal writes one range, its flag, not 0",
       [](Program& p) { p.commands[8].writes = {}; }},
      {"one range, its flag, not 2", [](Program& p) { p.commands[8].writes.push_back(Memory(0x8000, 4)); }},
      {"command 9): an await writes its flag first", [](Program& p) { p.commands[9].writes = {}; }},
      {"command 8): the flag has 8 bytes, not 4", [](Program& p) { p.commands[8].writes[0].bytes = 8; }},
      {"command 9): the flag has 2 bytes, not 4", [](Program& p) { p.commands[9].writes[0].bytes = 2; }},
      {"the flag's address is no multiple of 4", [](Program& p) { p.commands[9].writes[0].offset = 0x7102; }},
      {"a signal writes absolute addresses only",
       [](Program& p) { p.commands[8].writes[0] = OutputBytes(1, 0, 4); }},
      {"an await writes absolute addresses only",
       [](Program& p) { p.commands[9].writes[1] = OutputBytes(0, 0, 64); }},
      {"operator 'rows' (command 10): copies no rows", [](Program& p) { p.commands[10].rows.count = 0; }},
      {"copies 24 bytes into 56", [](Program& p) { p.commands[10].rows.count = 1; }},
      {"copies 3 rows that are 12 bytes apart within 24",
       [](Program& p) { p.commands[10].rows.read_pitch = 12; }},
      {"copies 3 rows that are 99 bytes apart within 56",
       [](Program& p) { p.commands[10].rows.write_pitch = 99; }},
      {"copies rows of 10 bytes that are 7 apart", [](Program& p) { p.commands[10].rows.read_pitch = 7; }},
      {"copies rows of 8 bytes into rows of 16", [](Program& p) { p.commands[10].rows.write_pitch = 20; }},
      {"operator 'sum' (command 11): a sum reads 2 to 16 ranges and writes 1, not 1 and 1",
       [](Program& p) { p.commands[11].reads.resize(1); }},
      {"not 17 and 1", [](Program& p) { p.commands[11].reads.resize(17, Memory(0xe000, 64)); }},
      {"not 2 and 0", [](Program& p) { p.commands[11].writes.clear(); }},
      {"not 2 and 2", [](Program& p) { p.commands[11].writes.push_back(Memory(0xf000, 64)); }},
      {"a sum is of absolute addresses only",
       [](Program& p) { p.commands[11].reads[1] = InputBytes(0, 0, 64); }},
      {"a sum is of absolute addresses only",
       [](Program& p) { p.commands[11].writes[0] = OutputBytes(0, 0, 64); }},
      {"takes 32 bytes of a sum where it wants 64", [](Program& p) { p.commands[11].reads[1].bytes = 32; }},
      {"the address or size of a summand is no multiple of 16",
       [](Program& p) { p.commands[11].reads[0].offset = 0xe008; }},
      {"the address or size of a summand is no multiple of 16",
       [](Program& p) {
         for (Range* r : {&p.commands[11].reads[0], &p.commands[11].reads[1], &p.commands[11].writes[0]})
           r->bytes = 40;
       }},
      {"the sum takes the place of a part of a summand",
       [](Program& p) { p.commands[11].writes[0].offset = 0xe010; }},
      {"the sum takes the place of a part of a summand",
       [](Program& p) { p.commands[11].writes[0].offset = 0xeff0; }},
      {"sum element is 2, not one of 0 to 1", [](Program& p) { p.commands[11].element = Element{2}; }},
      {"operator 'norm' (command 12): a sum with a norm reads 4 to 18 ranges and writes 2, not 3 and 2",
       [](Program& p) { p.commands[12].reads.pop_back(); }},
      {"not 4 and 1", [](Program& p) { p.commands[12].writes.pop_back(); }},
      {"takes 32 bytes of a sum where it wants 64", [](Program& p) { p.commands[12].reads[3].bytes = 32; }},
      {"takes 64 bytes of a sum where it wants 32",
       [](Program& p) { p.commands[12].norm->weight = Element::kBFloat16; }},
      {"a norm's weights are float32, or as the sum",
       [](Program& p) {
         p.commands[12].element = Element::kFloat32;
         p.commands[12].norm->weight = Element::kBFloat16;
         p.commands[12].reads[3].bytes = 32;
       }},
      {"the norm of rows of 24 bytes in 64",
       [](Program& p) {
         p.commands[12].norm->width = 12;
         p.commands[12].reads[3].bytes = 48;
       }},
      {"the norm of rows of 48 bytes in 64",
       [](Program& p) {
         p.commands[12].norm->width = 24;
         p.commands[12].reads[3].bytes = 96;
       }},
      {"the norm of rows of 32784 bytes in 32784",
       [](Program& p) {
         Command& c = p.commands[12];
         c = {CommandKind::kSum, 0, "norm", 0, {}, {}, {}, Element::kBFloat16, Norm{.width = 16392}};
         for (uint64_t i = 1; i <= 2; ++i) {
           c.reads.push_back(Memory(i << 20, 32784));
           c.writes.push_back(Memory(i << 30, 32784));
         }
       }},
      {"the sum takes the place of a part of a summand",
       [](Program& p) { p.commands[12].writes[1].offset = 0x10000; }},
      {"the sum takes the place of a part of a summand",
       [](Program& p) { p.commands[12].writes[1].offset = 0x12010; }},
      {"the sum takes the place of a part of a summand",
       [](Program& p) { p.commands[12].writes[0].offset = 0x13020; }},
      {"the sum takes the place of a part of a summand",  // of the weights, which are as long for a single
                                                          // row
       [](Program& p) {
         p.commands[12].norm->width = 32;
         p.commands[12].norm->weight = Element::kBFloat16;
         p.commands[12].reads[3] = p.commands[12].writes[0];
       }},
      {"the sum takes the place of a part of a summand",
       [](Program& p) {
         p.commands[12].norm->width = 32;
         p.commands[12].norm->weight = Element::kBFloat16;
         p.commands[12].reads[3] = p.commands[12].writes[1];
       }},
      {"command kind is 9, not one of 0 to 6", [](Program& p) { p.commands[0].kind = CommandKind{9}; }},
      {"input kind is 2, not one of 0 to 1", [](Program& p) { p.inputs[0].kind = InputKind{2}; }},
      {"range space is 3, not one of 0 to 2", [](Program& p) { p.commands[0].reads[0].space = Space{3}; }},
  };
  for (const Damage& damage : damages) {
    Program p = FullProgram();
    damage.inflict(p);
    const Status status = Decode(Encode(p)).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << damage.says;
    EXPECT_THAT(status.message(), HasSubstr(damage.says));
  }
}

TEST(Decode, TakesASumInThePlaceOfASummand) {
  EXPECT_TRUE(Decode(Encode(ProgramBuilder(1).Sum(0, "sum", Memory(0xe000, 64),
                                                  {Memory(0xf000, 64), Memory(0xe000, 64)})))
                  .ok());
}

TEST(Decode, TakesNormsOfAllKinds) {
  for (const bool residual : {false, true}) {
    for (const std::optional<Element> weight :
         {std::optional<Element>(), {Element::kFloat32}, {Element::kBFloat16}}) {
      for (const bool rounds : {false, true}) {
        const Norm norm{16, 0.5f, residual, weight, rounds, !rounds};
        std::vector<Range> reads = {Memory(0xe000, 64), Memory(0xf000, 64)};
        if (residual) reads.push_back(Memory(0x12000, 64));
        if (weight) reads.push_back(Memory(0x13000, 16 * BytesOf(*weight)));
        const Program p = ProgramBuilder(1).SumAndNorm(0, "norm", Memory(0xe000, 64), Memory(0x12000, 64),
                                                       reads, norm, Element::kBFloat16);
        auto decoded = Decode(Encode(p));
        ASSERT_TRUE(decoded.ok()) << decoded.status().message();
        EXPECT_EQ(*decoded, p);
      }
    }
  }
}

// Whatever the bytes, an answer: under the sanitizers this is a small fuzzer.
TEST(Decode, SurvivesRandomDamage) {
  const std::string whole = Encode(FullProgram());
  std::mt19937 random(7);
  size_t accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = whole;
    for (int i = 0; i <= round % 4; ++i) bytes[random() % bytes.size()] = static_cast<char>(random());
    auto decoded = Decode(bytes);
    if (!decoded.ok()) continue;
    ++accepted;
    EXPECT_EQ(Encode(*decoded), bytes);
  }
  EXPECT_GT(accepted, 0u);
}

}  // namespace
}  // namespace dynaflow
