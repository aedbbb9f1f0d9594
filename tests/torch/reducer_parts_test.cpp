// Tests the parts of a Reducer without ranks and without autograd.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "muster/store/store.h"
#include "muster/torch/exception.h"
#include "muster/torch/reducer/reducer_buckets.h"
#include "muster/torch/reducer/reducer_parts.h"
#include "muster/torch/reducer/reducer_unused.h"

namespace muster {
namespace {

using Numbers = std::vector<size_t>;

TEST(StaticGraph, ExpectsAsManyGradientsAsTheFirstBackwardHad) {
  StaticGraph graph(3);
  graph.begin_backward();
  EXPECT_TRUE(graph.counting());
  for (const size_t index : {1, 0, 1}) graph.count(index);
  EXPECT_EQ(graph.finish_counting(), (Numbers{2}));
  EXPECT_FALSE(graph.counting());
  for (int backward = 0; backward < 2; ++backward) {
    graph.begin_backward();
    EXPECT_FALSE(graph.take_call(1));
    EXPECT_TRUE(graph.take_call(0));
    EXPECT_EQ(graph.calls_left(1), 1);
    EXPECT_TRUE(graph.take_call(1));
    EXPECT_EQ(graph.calls_left(1), 0);
    EXPECT_EQ(graph.calls_left(2), 0) << "it is never used";
  }
}

TEST(StaticGraph, CountsAgainAfterReset) {
  StaticGraph graph(2);
  graph.count(0);
  graph.finish_counting();
  graph.reset();
  EXPECT_TRUE(graph.counting());
  graph.count(1);
  EXPECT_EQ(graph.finish_counting(), (Numbers{0}));
}

TEST(GradientArrivals, RefuseASecondArrivalUntilTheNextBackward) {
  GradientArrivals arrivals(2);
  arrivals.begin_backward(/*record_order=*/false);
  EXPECT_FALSE(arrivals.any());
  EXPECT_TRUE(arrivals.mark(1));
  EXPECT_FALSE(arrivals.mark(1));
  EXPECT_TRUE(arrivals.any());
  EXPECT_FALSE(arrivals.all());
  EXPECT_TRUE(arrivals.mark(0));
  EXPECT_TRUE(arrivals.all());
  arrivals.begin_backward(false);
  EXPECT_FALSE(arrivals.has_arrived(1));
  EXPECT_TRUE(arrivals.mark(1));
}

TEST(GradientArrivals, RecordTheOrderOfOneWholeBackward) {
  GradientArrivals arrivals(3);
  arrivals.begin_backward(/*record_order=*/true);
  for (const size_t index : {2, 0}) arrivals.mark(index);
  EXPECT_FALSE(arrivals.has_order());
  arrivals.mark(1);
  EXPECT_TRUE(arrivals.has_order());
  EXPECT_EQ(arrivals.order(), (Numbers{2, 0, 1}));
  arrivals.begin_backward(/*record_order=*/false);
  for (const size_t index : {0, 1, 2}) arrivals.mark(index);
  EXPECT_FALSE(arrivals.has_order());
}

TEST(UsedParameters, NoticeWhenTheUnusedOnesChange) {
  UsedParameters used(4);
  used.set_unused({1, 3});
  used.set_unused({1, 3});
  EXPECT_FALSE(used.has_changed());
  EXPECT_TRUE(used.all_unused({3, 1}));
  EXPECT_FALSE(used.all_unused({1, 2}));
  used.set_unused({3});
  EXPECT_TRUE(used.has_changed());
  used.set_unused({3});
  EXPECT_TRUE(used.has_changed()) << "it stays so";
  used.reset();
  EXPECT_FALSE(used.has_changed());
  EXPECT_TRUE(used.unused().empty());
}

TEST(UsedParameters, KnowGloballyUnusedOnesOnlyOnceReduced) {
  const auto store = memory_store();
  const auto group = value_or_throw(Group::form(*store, {0, 1, "used", 0}, {}));
  UsedParameters used(2);
  used.mark_used(1);
  EXPECT_FALSE(used.globally_unused(0)) << "another rank may use it";
  used.all_reduce_counts(*group);
  EXPECT_TRUE(used.reduced());
  EXPECT_TRUE(used.globally_unused(0));
  EXPECT_FALSE(used.globally_unused(1));
  used.clear_counts();
  EXPECT_FALSE(used.globally_unused(0));
  EXPECT_EQ(used.counts().sum().item<int>(), 0);
}

/// Stands for the all-reduce of a forward that counts the ranks with data.
class CountedRanks : public c10d::Work {
 public:
  explicit CountedRanks(int ranks) : ranks_(at::full({1}, ranks, at::kFloat)) {}
  bool wait(std::chrono::milliseconds) override { return true; }
  std::vector<at::Tensor> result() override { return {ranks_}; }

 private:
  at::Tensor ranks_;
};

TEST(JoinScale, AveragesOverTheRanksWithData) {
  JoinScale scale;
  EXPECT_EQ(scale.factor(8, false), 1);
  scale.divide_by(2, 8);
  EXPECT_EQ(scale.factor(8, false), 4);
  EXPECT_EQ(scale.factor(8, true), 4);
  scale.reset();
  EXPECT_EQ(scale.factor(8, false), 1) << "it holds for one backward";
}

TEST(JoinScale, LeavesTheCountToAHookThatDivides) {
  JoinScale scale;
  scale.divide_by_result_of(c10::make_intrusive<CountedRanks>(4));
  EXPECT_EQ(scale.factor(8, /*hook_divides=*/true), 1);
  EXPECT_EQ(scale.factor(8, /*hook_divides=*/false), 2);
  EXPECT_EQ(scale.factor(8, false), 2) << "for all buckets of the backward";
}

TEST(BucketPlan, FollowsTheOrderAndTheLimits) {
  ReducerContext context;
  for (const int64_t size : {4, 4, 100, 4, 4}) context.parameters.push_back(at::zeros({size}));
  context.options.sparse = {false, false, false, true, false};
  context.options.first_bucket_bytes = 16;
  context.options.bucket_bytes = 32;
  EXPECT_EQ(plan_buckets(context, {4, 3, 2, 1, 0}), (std::vector<Numbers>{{4}, {3}, {2}, {1, 0}}));
  EXPECT_EQ(plan_buckets(context, {0, 1, 4, 2, 3}), (std::vector<Numbers>{{0}, {1, 4}, {2}, {3}}));
  context.options.bucket_bytes_list = {1 << 10};
  EXPECT_EQ(plan_buckets(context, {4, 3, 2, 1, 0}), (std::vector<Numbers>{{3}, {4, 2, 1, 0}}));
}

TEST(BucketLayout, AlignsGradientsUnlessAHookReadsTheBuffer) {
  ReducerContext context;
  for (const int64_t size : {3, 5}) context.parameters.push_back(at::zeros({size}));
  EXPECT_EQ(BucketLayout(context, {1, 0}, /*aligned=*/true).offsets, (Numbers{0, 16}));
  const BucketLayout dense(context, {1, 0}, /*aligned=*/false);
  EXPECT_EQ(dense.offsets, (Numbers{0, 5}));
  EXPECT_EQ(dense.size, 8U);
  EXPECT_TRUE(at::equal(dense.view_in(at::arange(8), 1), at::arange(5, 8)));
}

}  // namespace
}  // namespace muster
