#include "xla_ffi/order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>
#include <vector>

#include "xla_ffi/tests/programs.h"

namespace dynaflow {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Order, FollowsAStream) {
  const Order order(ProgramBuilder(1).Launch(0, "a").Launch(0, "b").Launch(0, "c"));
  EXPECT_TRUE(order.Before(0, 1));
  EXPECT_TRUE(order.Before(0, 2));
  EXPECT_FALSE(order.Before(2, 0));
  EXPECT_FALSE(order.Before(1, 1));
}

TEST(Order, KnowsNothingOfOtherStreams) {
  const Order order(ProgramBuilder(2).Launch(0, "a").Launch(1, "b"));
  EXPECT_FALSE(order.Ordered(0, 1));
}

TEST(Order, FollowsAnEvent) {
  const Order order(ProgramBuilder(2)
                        .Launch(0, "before the record")
                        .Record(0, 0)
                        .Launch(0, "after the record")
                        .Launch(1, "before the wait")
                        .Wait(1, 0)
                        .Launch(1, "after the wait"));
  EXPECT_TRUE(order.Before(0, 5));
  EXPECT_FALSE(order.Ordered(2, 5));
  EXPECT_FALSE(order.Ordered(0, 3));
}

TEST(Order, IsTransitiveOverStreams) {
  const Order order(
      ProgramBuilder(3).Launch(0, "a").Record(0, 0).Wait(1, 0).Record(1, 1).Wait(2, 1).Launch(2, "b"));
  EXPECT_TRUE(order.Before(0, 5));
}

TEST(FindConflicts, WantsAWriterAndCommonBytes) {
  EXPECT_THAT(FindConflicts(ProgramBuilder(1)
                                .Launch(0, "reads", {Memory(100, 10)})
                                .Launch(0, "reads too", {Memory(100, 10)})
                                .Launch(0, "writes beside", {}, {Memory(110, 10)})
                                .Launch(0, "writes", {}, {Memory(108, 2)})),
              ElementsAre(Conflict{0, 3, Memory(108, 2)}, Conflict{1, 3, Memory(108, 2)}));
}

TEST(FindConflicts, SeesALongRangeBehindShortOnes) {
  EXPECT_THAT(FindConflicts(ProgramBuilder(1)
                                .Launch(0, "long", {}, {Memory(100, 1000)})
                                .Launch(0, "short", {Memory(200, 1)})
                                .Launch(0, "far", {Memory(1099, 1)})
                                .Launch(0, "out", {Memory(1100, 1)})),
              ElementsAre(Conflict{0, 1, Memory(200, 1)}, Conflict{0, 2, Memory(1099, 1)}));
}

TEST(FindConflicts, IgnoresEmptyRangesAndOneself) {
  EXPECT_THAT(FindConflicts(ProgramBuilder(1)
                                .Launch(0, "in place", {Memory(100, 10)}, {Memory(100, 10)})
                                .Launch(0, "empty", {}, {Memory(100, 0)})),
              IsEmpty());
}

TEST(FindConflicts, KeepsSpacesApart) {
  EXPECT_THAT(FindConflicts(ProgramBuilder(1)
                                .MovingInput(64)
                                .Output(64)
                                .Output(64)
                                .Launch(0, "a", {InputBytes(0, 0, 64)}, {OutputBytes(0, 0, 64)})
                                .Launch(0, "b", {Memory(32, 64)}, {OutputBytes(1, 0, 64)})),
              IsEmpty());
}

TEST(FindConflicts, KnowsThatAPinnedInputIsItsAddress) {
  EXPECT_THAT(FindConflicts(ProgramBuilder(1)
                                .PinnedInput(0x1000, 64)
                                .Launch(0, "writes", {}, {Memory(0x1020, 4)})
                                .Launch(0, "reads", {InputBytes(0, 0x20, 8)})),
              ElementsAre(Conflict{0, 1, Memory(0x1020, 4)}));
}

TEST(FindConflicts, KnowsThatADonorIsItsOutput) {
  EXPECT_THAT(FindConflicts(ProgramBuilder(1)
                                .MovingInput(64)
                                .Output(64, /*donor=*/0)
                                .Launch(0, "reads", {InputBytes(0, 0, 64)})
                                .Launch(0, "writes", {}, {OutputBytes(0, 8, 8)})),
              ElementsAre(Conflict{0, 1, InputBytes(0, 8, 8)}));
}

TEST(FindConflicts, KnowsThatAPinnedOutputIsItsAddress) {
  EXPECT_THAT(FindConflicts(ProgramBuilder(1)
                                .Output(64, /*donor=*/-1, /*address=*/0x1000)
                                .Launch(0, "writes", {}, {OutputBytes(0, 0x20, 8)})
                                .Launch(0, "reads", {Memory(0x1020, 4)})),
              ElementsAre(Conflict{0, 1, Memory(0x1020, 4)}));
}

TEST(CheckOverlap, NamesBothOperators) {
  const Status status = CheckOverlap(ProgramBuilder(2)
                                         .Launch(0, "attention", {}, {Memory(0x1000, 16)})
                                         .Launch(1, "ffn", {Memory(0x1008, 16)}));
  EXPECT_THAT(status.message(), AllOf(HasSubstr("'attention' (command 0) on stream 0"),
                                      HasSubstr("'ffn' (command 1) on stream 1"),
                                      HasSubstr("8 bytes at 0x1008"), HasSubstr("nothing orders them")));
}

TEST(CheckOverlap, IsContentWithOrder) {
  EXPECT_TRUE(CheckOverlap(FullProgram()).ok()) << CheckOverlap(FullProgram()).message();
}

TEST(CheckOverlap, ProtectsInputsThatAreNotDonated) {
  EXPECT_THAT(
      CheckOverlap(ProgramBuilder(1).MovingInput(8).Launch(0, "bad", {}, {InputBytes(0, 0, 8)})).message(),
      HasSubstr("operator 'bad' (command 0) writes input 0, which is not donated"));
  EXPECT_THAT(
      CheckOverlap(ProgramBuilder(1).PinnedInput(64, 8).Launch(0, "bad", {}, {Memory(70, 8)})).message(),
      HasSubstr("operator 'bad' (command 0) writes pinned input 0"));
  EXPECT_TRUE(
      CheckOverlap(ProgramBuilder(1).PinnedInput(64, 8).Output(8, 0).Launch(0, "cache", {}, {Memory(64, 8)}))
          .ok());
}

void* const kFlag = reinterpret_cast<void*>(0x100);

TEST(CheckOverlap, WantsWhatArrivesInOrderWithItsReaders) {
  const auto arrive = [&](ProgramBuilder& b) -> ProgramBuilder& {
    return b.Await(0, "receive", kFlag, 0, {Memory(0x1000, 64)});
  };
  ProgramBuilder unordered(2);
  EXPECT_THAT(CheckOverlap(arrive(unordered).Launch(1, "reads", {Memory(0x1020, 8)})).message(),
              AllOf(HasSubstr("'receive' (command 0)"), HasSubstr("'reads' (command 1)")));
  ProgramBuilder ordered(2);
  EXPECT_TRUE(
      CheckOverlap(arrive(ordered).Record(0, 0).Wait(1, 0).Launch(1, "reads", {Memory(0x1020, 8)})).ok());
}

TEST(CheckOverlap, WantsTheNextArrivalAfterTheReadersOfTheLast) {
  ProgramBuilder b(2);
  b.Await(0, "first", kFlag, 0, {Memory(0x1000, 64)})
      .Record(0, 0)
      .Wait(1, 0)
      .Launch(1, "reads", {Memory(0x1000, 64)})
      .Await(0, "second", kFlag, 0, {Memory(0x1000, 64)});
  EXPECT_THAT(CheckOverlap(b).message(), AllOf(HasSubstr("'reads'"), HasSubstr("'second'")));
  Program p = b;
  ASSERT_TRUE(OrderOverlaps(p).ok());
  EXPECT_TRUE(CheckOverlap(p).ok()) << CheckOverlap(p).message();
}

TEST(CheckOverlap, WantsASumAfterWhatItAddsAndBeforeItsReaders) {
  const Range own = Memory(0x1000, 64), others = Memory(0x2000, 64), total = Memory(0x3000, 64);
  const auto sum = [&](ProgramBuilder& b) -> ProgramBuilder& {
    return b.Sum(0, "sum", total, {own, others});
  };
  ProgramBuilder made(2), arrived(2), read(2);
  EXPECT_THAT(CheckOverlap(sum(made.Launch(1, "makes", {}, {own}))).message(),
              AllOf(HasSubstr("'makes'"), HasSubstr("'sum'")));
  EXPECT_THAT(CheckOverlap(sum(arrived.Await(1, "receive", kFlag, 0, {others}))).message(),
              AllOf(HasSubstr("'receive'"), HasSubstr("'sum'")));
  EXPECT_THAT(CheckOverlap(sum(read).Launch(1, "reads", {total})).message(),
              AllOf(HasSubstr("'sum'"), HasSubstr("'reads'")));
}

TEST(CheckOverlap, WantsTheUsersOfOneFlagInOrder) {
  EXPECT_THAT(CheckOverlap(ProgramBuilder(2).Await(0, "a", kFlag).Await(1, "b", kFlag)).message(),
              AllOf(HasSubstr("'a'"), HasSubstr("'b'"), HasSubstr("4 bytes at 0x100")));
  EXPECT_FALSE(CheckOverlap(ProgramBuilder(2).Signal(0, "a", kFlag).Signal(1, "b", kFlag)).ok());
}

TEST(CheckOverlap, ProtectsInputsFromWhatArrives) {
  EXPECT_THAT(
      CheckOverlap(
          ProgramBuilder(1).PinnedInput(0x1000, 64).Await(0, "receive", kFlag, 0, {Memory(0x1020, 64)}))
          .message(),
      HasSubstr("operator 'receive' (command 0) writes pinned input 0"));
}

TEST(CheckOverlap, RefusesACopyOntoAPartOfItself) {
  const auto says = [](const Program& p) {
    EXPECT_TRUE(Validate(p).ok()) << Validate(p).message();
    Program ordered = p;
    EXPECT_EQ(OrderOverlaps(ordered).status().message(), CheckOverlap(p).message());
    return CheckOverlap(p).message();
  };
  const auto copy = [&](Range to, Range from) {
    return says(
        ProgramBuilder(1).MovingInput(64).Output(64, /*donor=*/0).Output(32).Copy(0, "moves", to, from));
  };
  constexpr char kRefused[] = "'moves' (command 0) copies 32 bytes at 0x1000 to where a part of them is";
  EXPECT_THAT(copy(Memory(0x1001, 32), Memory(0x1000, 32)), HasSubstr(kRefused));
  EXPECT_THAT(copy(Memory(0xfff, 32), Memory(0x1000, 32)), HasSubstr(kRefused));
  EXPECT_THAT(copy(OutputBytes(0, 16, 32), InputBytes(0, 0, 32)), HasSubstr("32 bytes of input 0"));
  EXPECT_EQ(copy(Memory(0x1000, 32), Memory(0x1000, 32)), "") << "onto itself";
  EXPECT_EQ(copy(Memory(0x1020, 32), Memory(0x1000, 32)), "");
  EXPECT_EQ(copy(OutputBytes(1, 0, 32), InputBytes(0, 0, 32)), "");
  EXPECT_EQ(copy(Memory(0x1001, 0), Memory(0x1001, 0)), "");

  const auto rows = [&](uint64_t to, uint64_t from, uint64_t write_pitch) {
    return says(ProgramBuilder(1).CopyRows(0, "rows", Memory(to, 2 * write_pitch + 8), Memory(from, 72),
                                           {3, 32, write_pitch}));
  };
  EXPECT_EQ(rows(0x1008, 0x1000, 32), "") << "rows between rows";
  EXPECT_EQ(rows(0x1000, 0x1018, 32), "");
  EXPECT_EQ(rows(0x1000, 0x1000, 32), "");
  EXPECT_THAT(rows(0x1004, 0x1000, 32), HasSubstr("to where a part of them is"));
  EXPECT_THAT(rows(0x1020, 0x1000, 32), HasSubstr("to where a part of them is"));
  EXPECT_THAT(rows(0x1000, 0x101c, 32), HasSubstr("to where a part of them is"));
  EXPECT_THAT(rows(0x1008, 0x1000, 16), HasSubstr("to where a part of them is"));
}

TEST(OrderOverlaps, AddsTheMissingEvent) {
  Program p = ProgramBuilder(2)
                  .Launch(0, "writes", {}, {Memory(100, 8)})
                  .Launch(0, "unrelated")
                  .Launch(1, "reads", {Memory(100, 8)});
  auto added = OrderOverlaps(p);
  ASSERT_TRUE(added.ok());
  EXPECT_EQ(*added, 1u);
  ASSERT_EQ(p.commands.size(), 5u);
  EXPECT_EQ(p.commands[1].kind, CommandKind::kRecord);
  EXPECT_EQ(p.commands[1].name, "writes");
  EXPECT_EQ(p.commands[3].kind, CommandKind::kWait);
  EXPECT_EQ(p.commands[3].stream, 1u);
  EXPECT_TRUE(CheckOverlap(p).ok());
  EXPECT_TRUE(Validate(p).ok());
}

TEST(OrderOverlaps, WaitsOnceForTheLatestOfAStream) {
  Program p = ProgramBuilder(2)
                  .Launch(0, "first", {}, {Memory(100, 8)})
                  .Launch(0, "second", {}, {Memory(200, 8)})
                  .Launch(1, "reads both", {Memory(100, 8), Memory(200, 8)})
                  .Launch(1, "again", {Memory(100, 8)});
  auto added = OrderOverlaps(p);
  ASSERT_TRUE(added.ok());
  EXPECT_EQ(*added, 1u);
  EXPECT_TRUE(CheckOverlap(p).ok());
}

TEST(OrderOverlaps, SharesOneEventAmongReaders) {
  Program p = ProgramBuilder(3)
                  .Launch(0, "writes", {}, {Memory(100, 8)})
                  .Launch(1, "reads", {Memory(100, 8)})
                  .Launch(2, "reads too", {Memory(100, 8)});
  auto added = OrderOverlaps(p);
  ASSERT_TRUE(added.ok());
  EXPECT_EQ(*added, 1u);
  EXPECT_EQ(p.num_events, 1u);
  EXPECT_TRUE(CheckOverlap(p).ok());
}

TEST(OrderOverlaps, LeavesAnOrderedProgramAlone) {
  Program p = FullProgram();
  auto added = OrderOverlaps(p);
  ASSERT_TRUE(added.ok());
  EXPECT_EQ(*added, 0u);
  EXPECT_EQ(p, FullProgram());
}

// On random programs that lack one of the events that they need, if any: the verdict is the one that all
// conflicts together give.
TEST(CheckOverlap, AgreesWithAllConflicts) {
  std::mt19937 random(5);
  auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  size_t accepted = 0, refused = 0;
  for (int round = 0; round < 1000; ++round) {
    ProgramBuilder builder(1 + below(4));
    const auto streams = static_cast<uint32_t>(builder.program().streams.size());
    builder.MovingInput(64).PinnedInput(30, 16).MovingInput(64).Output(64, /*donor=*/0).Output(64);
    const auto place = [&]() -> Range {
      switch (below(6)) {
        case 0:
          return OutputBytes(below(2), below(56), 1 + below(8));
        case 1:
          return InputBytes(0, below(56), 1 + below(8));
        default:
          return Memory(50 + below(40), below(12));
      }
    };
    for (uint32_t i = 0; i < 16; ++i) {
      std::vector<Range> reads = {place(), place(), InputBytes(1, below(8), 8), InputBytes(2, 0, 8)};
      builder.Launch(below(streams), "op", std::move(reads), {place(), place()});
    }
    Program p = builder;
    ASSERT_TRUE(OrderOverlaps(p).ok());
    const auto is_wait = [](const Command& c) { return c.kind == CommandKind::kWait; };
    const auto waits = static_cast<uint32_t>(std::count_if(p.commands.begin(), p.commands.end(), is_wait));
    if (waits && below(2)) {
      auto it = p.commands.begin();
      for (uint32_t skip = below(waits); !is_wait(*it) || skip-- > 0;) ++it;
      p.commands.erase(it);
    }
    ASSERT_TRUE(Validate(p).ok()) << Validate(p).message();
    const Order order(p);
    const std::vector<Conflict> conflicts = FindConflicts(p);
    const bool fine = std::all_of(conflicts.begin(), conflicts.end(),
                                  [&](const Conflict& c) { return order.Ordered(c.first, c.second); });
    const Status status = CheckOverlap(p);
    EXPECT_EQ(status.ok(), fine) << status.message();
    ++(fine ? accepted : refused);
  }
  EXPECT_GT(accepted, 100u);
  EXPECT_GT(refused, 100u);
}

// The steps of a scan, each of which reads what the one before it wrote, in the same two places.
TEST(OrderOverlaps, TakesLongProgramsThatUseMemoryAgain) {
  constexpr uint32_t kSteps = 20000;
  ProgramBuilder builder(2);
  const Range carries[] = {Memory(0x1000, 64), Memory(0x2000, 64)}, weights = Memory(0x3000, 64);
  for (uint32_t i = 0; i < kSteps; ++i) {
    builder.Launch(i % 2, "step", {carries[i % 2], weights}, {carries[(i + 1) % 2]});
  }
  Program p = builder;
  const auto before = std::chrono::steady_clock::now();
  auto added = OrderOverlaps(p);
  ASSERT_TRUE(added.ok());
  EXPECT_EQ(*added, kSteps - 1);
  EXPECT_TRUE(CheckOverlap(p).ok());
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(20))
      << "not the square of its length";
}

// On random programs: conflicts equal the obvious quadratic search, and ordering them leaves none.
TEST(OrderOverlaps, HoldsOnRandomPrograms) {
  std::mt19937 random(11);
  auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  for (int round = 0; round < 300; ++round) {
    ProgramBuilder builder(1 + below(4));
    const auto streams = static_cast<uint32_t>(builder.program().streams.size());
    for (uint32_t i = 0, events = 0; i < 20; ++i) {
      if (below(5) == 0) {
        builder.Record(below(streams), events++);
      } else if (events && below(5) == 0) {
        builder.Wait(below(streams), below(events));
      } else {
        builder.Launch(below(streams), "op", {Memory(1 + below(60), below(8)), Memory(1 + below(60), 4)},
                       {Memory(1 + below(60), 1 + below(6))});
      }
    }
    Program p = builder;
    size_t expected = 0;
    auto meet = [](const std::vector<Range>& x, const std::vector<Range>& y) {
      for (const Range& a : x) {
        for (const Range& b : y) {
          if (a.bytes && b.bytes && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes)
            return true;
        }
      }
      return false;
    };
    for (size_t j = 0; j < p.commands.size(); ++j) {
      for (size_t i = 0; i < j; ++i) {
        const Command &a = p.commands[i], &b = p.commands[j];
        expected += meet(a.writes, b.writes) || meet(a.writes, b.reads) || meet(a.reads, b.writes);
      }
    }
    EXPECT_EQ(FindConflicts(p).size(), expected);
    ASSERT_TRUE(OrderOverlaps(p).ok());
    EXPECT_TRUE(Validate(p).ok()) << Validate(p).message();
    EXPECT_TRUE(CheckOverlap(p).ok()) << CheckOverlap(p).message();
  }
}

}  // namespace
}  // namespace dynaflow
