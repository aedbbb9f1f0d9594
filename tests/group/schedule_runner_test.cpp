// The cache of plans, and the choice of algorithms.
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
  EXPECT_TRUE(validate_and_infer(operation, GroupSpec{0, 4, {}, 0}));
  return operation;
}

TEST(ScheduleRunner, PlansACallOnce) {
  ScheduleRunner schedule_runner;
  const Schedule* const first = *schedule_runner.plan(all_reduce_of(100), 0, 4);
  EXPECT_FALSE(schedule_runner.peers().empty());
  EXPECT_EQ(*schedule_runner.plan(all_reduce_of(100), 0, 4), first);
  EXPECT_NE(*schedule_runner.plan(all_reduce_of(101), 0, 4), first);
  EXPECT_EQ(*schedule_runner.plan(all_reduce_of(100), 0, 4), first);
}

TEST(ScheduleRunner, EvictsTheLeastRecentlyUsedPlan) {
  ScheduleRunner schedule_runner;
  const Schedule* const kept = *schedule_runner.plan(all_reduce_of(1), 0, 4);
  for (size_t count = 2; count < 1000; ++count) {
    ASSERT_TRUE(schedule_runner.plan(all_reduce_of(count), 0, 4));
    EXPECT_EQ(*schedule_runner.plan(all_reduce_of(1), 0, 4), kept) << "after " << count;
  }
}

TEST(ScheduleRunner, TakesTheRequestedAlgorithm) {
  const auto plan_with = [](const char* wanted) {
    Tuning tuning;
    tuning.wanted = parse_wanted(wanted).value();
    ScheduleRunner schedule_runner(tuning);
    return to_string(**schedule_runner.plan(all_reduce_of(1 << 14), 0, 4));
  };
  EXPECT_NE(plan_with("all_reduce=ring"), plan_with("all_reduce=recursive_doubling"));
}

TEST(ScheduleRunner, RefusesAnUnknownAlgorithmAtForming) {
  setenv("MUSTER_ALGO", "all_reduce=nonsense", 1);
  const auto group = Group::form(*memory_store(), {0, 1, "test", 0}, GroupOptions{});
  unsetenv("MUSTER_ALGO");
  ASSERT_FALSE(group);
  EXPECT_EQ(group.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(group.error().message.find("ring"), std::string::npos) << group.error().to_string();
}

}  // namespace
}  // namespace muster
