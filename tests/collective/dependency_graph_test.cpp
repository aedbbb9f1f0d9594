#include "muster/collective/schedule/dependency_graph.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "muster/collective/schedule/schedule_builder.h"

namespace muster::test {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

/// Calls `event` and returns the steps that became ready.
template <class Event>
std::vector<uint32_t> ready_after(Event&& event) {
  std::vector<uint32_t> steps;
  event([&](uint32_t step) { steps.push_back(step); });
  return steps;
}

class DependencyGraphTest : public testing::Test {
 protected:
  std::vector<uint32_t> begin() {
    return ready_after([&](auto ready) { graph_.begin_run(ready); });
  }
  std::vector<uint32_t> start(uint32_t step) {
    return ready_after([&](auto ready) { graph_.on_started(step, ready); });
  }
  std::vector<uint32_t> end(uint32_t step) {
    return ready_after([&](auto ready) { graph_.on_ended(step, ready); });
  }

  static std::vector<Step> steps() {
    ScheduleBuilder builder;
    const uint32_t first = builder.receive(1, output(0, 8));     // 0
    const uint32_t second = builder.receive(1, output(8, 8));    // 1
    builder.send(1, output(0, 8), {first});                      // 2
    builder.copy(output(0, 8), output(16, 8), {first, second});  // 3
    builder.send(2, output(0, 8), {first});                      // 4
    return builder.take().steps;
  }

  DependencyGraph graph_{steps()};
};

TEST_F(DependencyGraphTest, OrdersStepsWithOnePeerByTheirStarts) {
  EXPECT_THAT(begin(), ElementsAre(0));
  EXPECT_THAT(start(0), ElementsAre(1));
  EXPECT_THAT(start(1), IsEmpty());
}

TEST_F(DependencyGraphTest, ReleasesAStepAfterItsLastDependency) {
  begin();
  start(0);
  start(1);
  EXPECT_THAT(end(0), ElementsAre(2, 4));
  EXPECT_THAT(end(1), ElementsAre(3));
}

TEST_F(DependencyGraphTest, OpensAllDependenciesInEachRun) {
  begin();
  start(0);
  end(0);
  EXPECT_THAT(begin(), ElementsAre(0));
  EXPECT_THAT(start(0), ElementsAre(1));
  EXPECT_THAT(end(0), ElementsAre(2, 4));
}

TEST_F(DependencyGraphTest, FindsTheFirstStepOfEachDirection) {
  EXPECT_TRUE(graph_.is_first_with_peer(0));
  EXPECT_FALSE(graph_.is_first_with_peer(1));
  EXPECT_TRUE(graph_.is_first_with_peer(2));
  EXPECT_FALSE(graph_.is_first_with_peer(3)) << "it has no peer";
  EXPECT_TRUE(graph_.is_first_with_peer(4));
}

TEST_F(DependencyGraphTest, ListsRunningSteps) {
  begin();
  EXPECT_FALSE(graph_.is_running(0));
  start(0);
  EXPECT_TRUE(graph_.is_running(0));
  end(0);
  EXPECT_FALSE(graph_.is_running(0));
}

TEST(DependencyGraphDeathTest, RefusesADependencyOnALaterStep) {
  std::vector<Step> steps(2, Step{.kind = Step::Kind::kCopy});
  steps[0].after = 1;
  EXPECT_DEATH(DependencyGraph{steps}, "depends on a later one");
}

}  // namespace
}  // namespace muster::test
