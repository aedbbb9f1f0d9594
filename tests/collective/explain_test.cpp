#include "muster/collective/explain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(Explain, ShowsCandidatesTheChoiceAndSteps) {
  const auto text = explain({.bytes = 1 << 20, .ranks = 4, .rank = 1}, {});
  ASSERT_TRUE(text);
  EXPECT_THAT(*text, AllOf(HasSubstr("all_reduce of 1 MiB on 4 ranks"), HasSubstr("recursive_doubling"),
                           HasSubstr("-> "), HasSubstr("steps of rank 1"), HasSubstr("0: send input[")));
}

TEST(Explain, ShowsWhatCrossesBetweenNodesThatHaveSeveralRanks) {
  const auto two = explain({.bytes = 1 << 20, .ranks = 16, .nodes = 2}, {});
  ASSERT_TRUE(two);
  EXPECT_THAT(*two, AllOf(HasSubstr("in two levels"), HasSubstr("Between 2 nodes"), HasSubstr("131072")))
      << "an eighth of the tensor crosses from each rank";
  EXPECT_THAT(*explain({.ranks = 2, .nodes = 2}, {}), Not(HasSubstr("two levels")));
  EXPECT_THAT(*explain({.collective = Collective::kAllToAll, .ranks = 16, .nodes = 2}, {}),
              Not(HasSubstr("two levels")));
}

TEST(Explain, SaysWhoseChoiceItIs) {
  Tuning tuning;
  tuning.wanted = *parse_wanted("all_reduce=ring");
  EXPECT_THAT(*explain({.bytes = 8, .ranks = 4}, tuning), AllOf(HasSubstr("-> ring"), HasSubstr("MUSTER_ALGO")));
  EXPECT_THAT(*explain({.bytes = 8, .ranks = 4}, {}), Not(HasSubstr("MUSTER_ALGO asks")));
}

TEST(Explain, CutsLongListsOfSteps) {
  EXPECT_THAT(*explain({.bytes = 1 << 26, .ranks = 8, .most_steps = 3}, {}), HasSubstr("... and "));
}

TEST(Explain, PlaysThroughOnlyWhatIsSoonDone) {
  EXPECT_THAT(*explain({.bytes = 1 << 20, .ranks = 512}, {}), HasSubstr("step by step"));
  EXPECT_THAT(*explain({.bytes = size_t{64} << 30, .ranks = 512}, {}), Not(HasSubstr("step by step")));
}

TEST(Explain, AnswersForEveryCollective) {
  for (int number = 1; number < kCollectiveCount; ++number) {
    for (const int nodes : {1, 2, 4}) {
      const Question question{.collective = static_cast<Collective>(number), .ranks = 8, .nodes = nodes, .root = 5};
      EXPECT_TRUE(explain(question, {})) << number;
    }
  }
}

TEST(Explain, RefusesQuestionsWithoutSense) {
  for (const Question& question :
       {Question{.ranks = 0}, Question{.ranks = 3, .nodes = 2}, Question{.ranks = 2, .root = 2},
        Question{.ranks = 2, .rank = -1}, Question{.kind = "carrier pigeon"}}) {
    EXPECT_EQ(explain(question, {}).error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_THAT(collective_named("allreduce").error().message, HasSubstr("all_reduce, broadcast, all_gather"));
}

}  // namespace
}  // namespace muster::test
