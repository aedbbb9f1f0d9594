#include "muster/launch/output/output.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "muster/base/host_name.h"
#include "muster/base/random.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

struct Pieces {
  std::vector<std::pair<std::string, LineEnd>> got;
  LineSplitter splitter{[this](std::string_view text, LineEnd end) { got.emplace_back(text, end); }};
};

TEST(LineSplitter, ReturnsOnlyWholeLines) {
  Pieces p;
  p.splitter.feed("one\ntw");
  EXPECT_THAT(p.got, ElementsAre(Pair("one", LineEnd::kNewline)));
  p.splitter.feed("o\n\n");
  EXPECT_THAT(p.got,
              ElementsAre(Pair("one", LineEnd::kNewline), Pair("two", LineEnd::kNewline), Pair("", LineEnd::kNewline)));
}

TEST(LineSplitter, ReturnsTheRestAtTheEndOfTheStream) {
  Pieces p;
  p.splitter.feed("last words");
  EXPECT_THAT(p.got, IsEmpty());
  p.splitter.finish();
  p.splitter.finish();
  EXPECT_THAT(p.got, ElementsAre(Pair("last words", LineEnd::kNone)));
}

TEST(LineSplitter, ACarriageReturnRewritesUnlessANewlineFollows) {
  Pieces p;
  p.splitter.feed("10%\r20%\r");
  p.splitter.feed("\nnext\r\n");
  EXPECT_THAT(p.got, ElementsAre(Pair("10%", LineEnd::kRewrite), Pair("20%", LineEnd::kNewline),
                                 Pair("next", LineEnd::kNewline)));
}

TEST(LineSplitter, RecognizesABarAfterACarriageReturn) {
  Pieces p;
  p.splitter.feed("\r10%");
  EXPECT_EQ(p.splitter.rewriting(), "10%");
  p.splitter.feed("|\r");
  EXPECT_EQ(p.splitter.rewriting(), "10%|");  // the text after '\r' is not known yet
  p.splitter.feed("2");
  EXPECT_EQ(p.splitter.rewriting(), "2");
  p.splitter.feed("\nplain");
  EXPECT_EQ(p.splitter.rewriting(), "");
}

TEST(LineSplitter, CutsALineThatIsTooLong) {
  Pieces p;
  p.splitter.feed(std::string(LineSplitter::kMaxLine + 10, 'x') + "\n");
  ASSERT_EQ(p.got.size(), 2U);
  EXPECT_EQ(p.got[0].first.size(), LineSplitter::kMaxLine);
  EXPECT_EQ(p.got[1], std::make_pair(std::string(10, 'x'), LineEnd::kNewline));
}

TEST(LineSplitter, PassesAnyBytes) {
  Pieces p;
  const std::string binary("\xff\xfe\0z\x80", 5);
  p.splitter.feed(binary + "\n");
  EXPECT_THAT(p.got, ElementsAre(Pair(binary, LineEnd::kNewline)));
}

TEST(LineSplitter, IsIndependentOfReadSizes) {
  const std::string text = "a\nbb\r\nccc\r10%\r20%\r\n\n\rend\rlast";
  Pieces whole;
  whole.splitter.feed(text);
  whole.splitter.finish();
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    Pieces cut;
    for (std::string_view rest = text; !rest.empty();) {
      const size_t take = random.between(1, rest.size());
      cut.splitter.feed(rest.substr(0, take));
      rest.remove_prefix(take);
    }
    cut.splitter.finish();
    EXPECT_EQ(cut.got, whole.got);
  }
}

struct Captured {
  explicit Captured(bool terminal) : screen(terminal, [this](std::string_view text) { out += text; }) {}
  std::string out;
  Terminal screen;
};

TEST(PrefixedStream, EveryLineOfEveryStreamHasItsPrefix) {
  Captured c(false);
  PrefixedStream a(c.screen, rank_prefix(0, false));
  PrefixedStream b(c.screen, rank_prefix(11, false));
  a.feed("half ");
  b.feed("whole\n");
  a.feed("line\nrest");
  a.finish();
  EXPECT_EQ(c.out, "[rank 11] whole\n[rank 0] half line\n[rank 0] rest\n");
}

TEST(PrefixedStream, BarUpdatesAreLinesWithoutATerminal) {
  Captured c(false);
  PrefixedStream a(c.screen, "> ");
  a.feed("\r10%\r20%\n");
  EXPECT_EQ(c.out, "> 10%\n> 20%\n");
}

TEST(PrefixedStream, OnATerminalABarIsDrawnInPlace) {
  Captured c(true);
  PrefixedStream a(c.screen, "> ");
  a.feed("\r10%");
  EXPECT_EQ(c.out, "\r\x1b[K> 10%");
  c.out.clear();
  a.feed("\r20%");
  EXPECT_THAT(c.out, ::testing::EndsWith("\r\x1b[K> 20%"));
  EXPECT_THAT(c.out, ::testing::Not(HasSubstr("\n")));
  c.out.clear();
  a.feed("\n");
  EXPECT_EQ(c.out, "\r\x1b[K> 20%\n");
}

TEST(PrefixedStream, LinesOfOthersAppearAboveTheBar) {
  Captured c(true);
  PrefixedStream a(c.screen, "a ");
  PrefixedStream b(c.screen, "b ");
  a.feed("\rbar");
  c.out.clear();
  b.feed("line\n");
  EXPECT_EQ(c.out, "\r\x1b[Kb line\na bar");
}

TEST(PrefixedStream, OneBarAtATime) {
  Captured c(true);
  PrefixedStream a(c.screen, "a ");
  PrefixedStream b(c.screen, "b ");
  a.feed("\rmine");
  c.out.clear();
  b.feed("\ralso");
  EXPECT_EQ(c.out, "");
  a.feed("\n");
  c.out.clear();
  b.feed("\rnow");
  EXPECT_THAT(c.out, HasSubstr("b now"));
}

TEST(Tail, KeepsTheLastBytes) {
  Tail tail;
  for (int i = 0; i < 10000; ++i) tail.feed("line " + std::to_string(i) + " with some more words\n");
  EXPECT_THAT(tail.text(), ::testing::EndsWith("line 9999 with some more words\n"));
  EXPECT_GE(tail.text().size(), Tail::kMax);
  EXPECT_LE(tail.text().size(), 2 * Tail::kMax);
  tail.feed(std::string(5 * Tail::kMax, 'x'));
  EXPECT_EQ(tail.text(), std::string(Tail::kMax, 'x'));
}

TEST(RankPrefix, HasAColorForEachRankIfEnabled) {
  EXPECT_EQ(rank_prefix(3, false), "[rank 3] ");
  EXPECT_THAT(rank_prefix(3, true), HasSubstr("\x1b["));
  EXPECT_NE(rank_prefix(3, true), rank_prefix(4, true));
}

TEST(ExpandPrefix, ReplacesTorchrunsNames) {
  EXPECT_EQ(expand_prefix("[${role_name}${rank}/$local_rank] $other ", "trainer", 12, 3), "[trainer12/3] $other ");
  EXPECT_EQ(expand_prefix("${hostname}:${rank}: ", "trainer", 12, 3), host_name() + ":12: ");
  EXPECT_EQ(expand_prefix("", "trainer", 1, 1), "");
}

}  // namespace
}  // namespace muster
