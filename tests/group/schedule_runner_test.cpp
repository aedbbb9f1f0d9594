// Which plans are kept, and what they are chosen by.
#include "muster/group/engine/schedule_runner.h"

#include <gtest/gtest.h>

#include "muster/group/group.h"
#include "muster/group/operations.h"

namespace muster {
namespace {

Operation all_reduce_of(size_t count) {
  static float memory[1 << 16];
  Operation operation;
  operation.call.collective = Collective::kAllReduce;
  operation.input = operation.output = {memory, count, Dtype::kFloat32};
  EXPECT_TRUE(complete(operation, Membership{0, 4, {}, 0}));
  return operation;
}

TEST(Passage, PlansACallOnce) {
  Passage passage;
  const Schedule* const first = *passage.plan(all_reduce_of(100), 0, 4);
  EXPECT_FALSE(passage.peers().empty());
  EXPECT_EQ(*passage.plan(all_reduce_of(100), 0, 4), first);
  EXPECT_NE(*passage.plan(all_reduce_of(101), 0, 4), first);
  EXPECT_EQ(*passage.plan(all_reduce_of(100), 0, 4), first);
}

TEST(Passage, ForgetsThePlanThatWasNotUsedForLongest) {
  Passage passage;
  const Schedule* const kept = *passage.plan(all_reduce_of(1), 0, 4);
  for (size_t count = 2; count < 1000; ++count) {
    ASSERT_TRUE(passage.plan(all_reduce_of(count), 0, 4));
    EXPECT_EQ(*passage.plan(all_reduce_of(1), 0, 4), kept) << "after " << count;
  }
}

TEST(Passage, TakesTheAlgorithmThatIsAskedFor) {
  const auto plan_with = [](const char* wanted) {
    Tuning tuning;
    tuning.wanted = parse_wanted(wanted).value();
    Passage passage;
    passage.choose_by(tuning, "tcp", 1);
    return to_string(**passage.plan(all_reduce_of(1 << 14), 0, 4));
  };
  EXPECT_NE(plan_with("all_reduce=ring"), plan_with("all_reduce=recursive_doubling"));
}

TEST(Passage, RefusesAnAlgorithmThatNobodyKnowsWhenTheGroupForms) {
  setenv("MUSTER_ALGO", "all_reduce=nonsense", 1);
  const auto group = Group::form(*memory_store(), {0, 1, "test", 0}, GroupOptions{});
  unsetenv("MUSTER_ALGO");
  ASSERT_FALSE(group);
  EXPECT_EQ(group.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(group.error().message.find("ring"), std::string::npos) << group.error().to_string();
}

}  // namespace
}  // namespace muster
