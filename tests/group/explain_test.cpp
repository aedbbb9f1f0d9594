#include "muster/group/explain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(Explain, ShowsCandidatesTheChoiceAndSteps) {
  const auto text = explain({.bytes = 1 << 20, .ranks = 4, .nodes = 4, .rank = 1}, {});
  ASSERT_TRUE(text);
  EXPECT_THAT(*text,
              AllOf(HasSubstr("all_reduce of 1 MiB on 4 ranks, 4 nodes, links: tcp"), HasSubstr("recursive_doubling"),
                    HasSubstr("-> "), HasSubstr("steps of rank 1"), HasSubstr("0: send input[")));
}

TEST(Explain, ShowsTheFormForRanksOfOneHost) {
  const auto text = explain({.bytes = 1 << 20, .ranks = 4}, {});
  ASSERT_TRUE(text);
  EXPECT_THAT(*text, AllOf(HasSubstr("all_reduce of 1 MiB on 4 ranks, 1 node, through shared memory"),
                           HasSubstr("  two shots: "), HasSubstr("8 chunks of 128 KiB, 9 waits"),
                           HasSubstr("in the group's arena (allocate_tensor, muster.nn), direct: "),
                           HasSubstr("256 KiB, of all tensors")));
  EXPECT_THAT(*text, Not(HasSubstr("recursive_doubling")));
  EXPECT_THAT(*explain({.bytes = 8, .ranks = 4}, {}),
              AllOf(HasSubstr("  inline payload: "), HasSubstr("1 wait,"), Not(HasSubstr("direct"))));
  EXPECT_THAT(*explain({.collective = Collective::kBarrier, .ranks = 4}, {}),
              AllOf(HasSubstr("barrier on 4 ranks"), HasSubstr("1 wait\n")));
}

TEST(Explain, ShowsLinksOnOneHostIfRequested) {
  EXPECT_THAT(*explain({.bytes = 1 << 20, .ranks = 4, .kind = "unix"}, {}),
              AllOf(HasSubstr("links: unix"), HasSubstr("-> "), Not(HasSubstr("shots"))));
}

TEST(Explain, ShowsTheTwoLevelsOfNodesThatHaveSeveralRanks) {
  const auto text = explain({.bytes = 1 << 20, .ranks = 16, .nodes = 2}, {});
  ASSERT_TRUE(text);
  EXPECT_THAT(*text, AllOf(HasSubstr("shared memory within a node, links: tcp between nodes"),
                           HasSubstr("within a node, reduce_scatter, pieces for every rank: "),
                           HasSubstr("between nodes, all_reduce, recursive_doubling by each of a node's 8 ranks"),
                           HasSubstr("within a node, all_gather, chunks from every rank: "), HasSubstr("in all: ")));
  EXPECT_THAT(*text, HasSubstr("send input[0, 131072)")) << "an eighth of the tensor crosses from each rank";
  EXPECT_THAT(*explain({.bytes = 20 << 20, .ranks = 16, .nodes = 2}, {}), HasSubstr("in 3 chunks of 8 MiB"));
  EXPECT_THAT(*explain({.collective = Collective::kBroadcast, .ranks = 16, .nodes = 2}, {}),
              AllOf(HasSubstr("within the root's node, broadcast"), HasSubstr("within a node, all_gather")));
  EXPECT_THAT(*explain({.ranks = 2, .nodes = 2}, {}), Not(HasSubstr("within a node")));
  EXPECT_THAT(*explain({.collective = Collective::kAllToAll, .ranks = 16, .nodes = 2}, {}),
              Not(HasSubstr("within a node")));
}

TEST(Explain, PrintsTheSourceOfTheChoice) {
  Tuning tuning;
  tuning.wanted = *parse_wanted("all_reduce=ring");
  EXPECT_THAT(*explain({.bytes = 8, .ranks = 4, .nodes = 4}, tuning),
              AllOf(HasSubstr("-> ring"), HasSubstr("MUSTER_ALGO")));
  EXPECT_THAT(*explain({.bytes = 8, .ranks = 8, .nodes = 4}, tuning),
              AllOf(HasSubstr("between nodes, all_reduce, ring by each"), HasSubstr("MUSTER_ALGO asks for it")));
  EXPECT_THAT(*explain({.bytes = 8, .ranks = 4}, tuning),
              AllOf(HasSubstr("inline payload"), HasSubstr("MUSTER_ALGO asks for ring, an algorithm of links")));
  EXPECT_THAT(*explain({.bytes = 8, .ranks = 4}, {}), Not(HasSubstr("MUSTER_ALGO asks")));
}

TEST(Explain, PrintsWhichCostsWereMeasured) {
  Tuning tuning;
  tuning.machine.measured = true;
  EXPECT_THAT(*explain({.ranks = 4, .nodes = 4}, tuning), HasSubstr("costs of this machine: measured"));
  EXPECT_THAT(*explain({.ranks = 4}, tuning), HasSubstr("defaults (`muster tune` measures them)"));
  EXPECT_THAT(*explain({.ranks = 4, .nodes = 2}, tuning), HasSubstr("defaults (`muster tune` measures them)"));
  tuning.machine.memory.measured = true;
  EXPECT_THAT(*explain({.ranks = 4}, tuning), HasSubstr("costs of this machine: measured"));
}

TEST(Explain, CutsLongListsOfSteps) {
  EXPECT_THAT(*explain({.bytes = 1 << 26, .ranks = 8, .nodes = 8, .max_steps = 3}, {}), HasSubstr("... and "));
}

TEST(Explain, SimulatesOnlySmallRuns) {
  EXPECT_THAT(*explain({.bytes = 1 << 20, .ranks = 512, .nodes = 512}, {}), HasSubstr("step by step"));
  EXPECT_THAT(*explain({.bytes = size_t{64} << 30, .ranks = 512, .nodes = 512}, {}), Not(HasSubstr("step by step")));
}

TEST(Explain, AnswersForEveryCollective) {
  for (int number = 1; number < kCollectiveCount; ++number) {
    for (const int nodes : {1, 2, 4}) {
      const Question question{.collective = static_cast<Collective>(number), .ranks = 8, .nodes = nodes, .root = 5};
      EXPECT_TRUE(explain(question, {})) << number;
    }
  }
}

TEST(Explain, ShowsTheSlicesOfARingInATable) {
  Tuning tuning;
  tuning.wanted = *parse_wanted("all_reduce=ring");
  const auto text = explain_table({.ranks = 3}, tuning);
  ASSERT_TRUE(text);
  EXPECT_THAT(*text, AllOf(HasSubstr("all_reduce by ring on 3 ranks\n\n| round | messages"),
                           HasSubstr("| start |                                                | a0 b0 c0 "),
                           HasSubstr("| 1     | 0->1: a0, 1->2: b1, 2->0: c2"), HasSubstr("| a0 b0 [c0+c2] "),
                           HasSubstr("| 4 ")));
  EXPECT_THAT(*text, Not(HasSubstr("| 5 ")));
}

TEST(Explain, DrawsAnArrowForEachMessage) {
  const auto text = explain_picture({.collective = Collective::kAllToAll, .ranks = 4}, {});
  ASSERT_TRUE(text);
  size_t arrows = 0;
  for (size_t at = 0; (at = text->find("<line ", at)) != std::string::npos; ++at) ++arrows;
  EXPECT_EQ(arrows, 4 * 3) << *text;
  EXPECT_THAT(*text, AllOf(HasSubstr("<svg "), HasSubstr(">d0<"), HasSubstr("</svg>\n"), Not(HasSubstr("\n\n"))));
}

TEST(Explain, DrawsEveryCollectiveOnOneToSixteenRanks) {
  for (int number = 1; number < kCollectiveCount; ++number) {
    for (const int ranks : {1, 2, 3, 16}) {
      const Question question{.collective = static_cast<Collective>(number), .ranks = ranks, .root = ranks - 1};
      EXPECT_TRUE(explain_table(question, {})) << number;
      EXPECT_TRUE(explain_picture(question, {})) << number;
    }
  }
  EXPECT_THAT(explain_table({.ranks = 17}, {}).error().message, HasSubstr("1 to 16 ranks, got 17"));
  EXPECT_THAT(explain_picture({.ranks = 3, .nodes = 2}, {}).error().message,
              HasSubstr("the number of ranks must be a multiple of the number of nodes"));
}

TEST(Explain, RefusesInvalidQuestions) {
  for (const Question& question :
       {Question{.ranks = 0}, Question{.ranks = 3, .nodes = 2}, Question{.ranks = 2, .root = 2},
        Question{.ranks = 2, .rank = -1}, Question{.kind = "carrier pigeon"}}) {
    EXPECT_EQ(explain(question, {}).error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_THAT(collective_named("allreduce").error().message, HasSubstr("all_reduce, broadcast, all_gather"));
}

}  // namespace
}  // namespace muster::test
