#include "muster/launch/job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

namespace muster {
namespace {

using ::testing::HasSubstr;

constexpr Duration kPlenty = std::chrono::seconds(60);

Deadline soon() { return Deadline::after(kPlenty); }

NodeInfo node(const std::string& host, int nproc, int nnodes) { return {host, 100, nproc, nnodes}; }

class JobBoards : public ::testing::Test {
 protected:
  std::unique_ptr<Store> store_ = memory_store();
  JobBoard board_{*store_, "run"};
};

TEST_F(JobBoards, RanksFollowFromEveryNodesOwnCount) {
  Placement places[3];
  std::thread threads[3];
  for (int i = 0; i < 3; ++i)
    threads[i] = std::thread([&, i] { places[i] = board_.join(node("h", i + 1, 3), i, kPlenty).value(); });
  for (auto& thread : threads) thread.join();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(places[i].node_rank, i);
    EXPECT_EQ(places[i].world_size, 6);
    EXPECT_EQ(places[i].first_rank, i * (i + 1) / 2);
    EXPECT_EQ(places[i].nproc, i + 1);
  }
}

TEST_F(JobBoards, NodesWithoutARankTakeTheFreePlaces) {
  constexpr size_t kNodes = 8;
  std::vector<int> places(kNodes, -1);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kNodes; ++i) {
    threads.emplace_back([&, i] {
      const auto wanted = i == 3 ? std::optional<int>(0) : std::nullopt;
      // The owner of place 0 may find it taken: then it is told so, and one more without a rank fills the row.
      auto joined = board_.join(node(std::to_string(i), 1, kNodes), wanted, kPlenty);
      if (!joined) joined = board_.join(node("again", 1, kNodes), std::nullopt, kPlenty);
      places[i] = joined.value().node_rank;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(places, ::testing::UnorderedElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

TEST_F(JobBoards, ANodeRankGivenTwiceNamesTheOtherHost) {
  (void)board_.join(node("first", 1, 2), 1, Duration::zero());
  const auto second = board_.join(node("second", 1, 2), 1, kPlenty);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kAlreadyExists);
  EXPECT_THAT(second.error().message, HasSubstr("node rank 1 is taken by host first"));
}

TEST_F(JobBoards, NodesThatDisagreeAboutTheirNumberAreRefused) {
  (void)board_.join(node("first", 1, 2), 0, Duration::zero());
  const auto second = board_.join(node("second", 1, 3), 1, kPlenty);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kMismatch);
  EXPECT_THAT(second.error().message, HasSubstr("--nnodes 3"));
  EXPECT_THAT(second.error().message, HasSubstr("host first with --nnodes 2"));
}

TEST_F(JobBoards, NodesThatDoNotComeAreNamed) {
  const auto alone = board_.join(node("h", 1, 4), 2, Duration::zero());
  ASSERT_FALSE(alone);
  EXPECT_EQ(alone.error().code, ErrorCode::kTimeout);
  EXPECT_THAT(alone.error().message, HasSubstr("of 4 nodes nodes 0, 1, 3 did not come"));
}

TEST_F(JobBoards, OneNodeTooManyIsToldSo) {
  (void)board_.join(node("a", 1, 2), 0, Duration::zero());
  (void)board_.join(node("b", 1, 2), std::nullopt, kPlenty);
  const auto third = board_.join(node("c", 1, 2), std::nullopt, kPlenty);
  ASSERT_FALSE(third);
  EXPECT_THAT(third.error().message, HasSubstr("all 2 nodes"));
}

TEST_F(JobBoards, TheFirstOutcomeHolds) {
  EXPECT_EQ(board_.conclude({3, "first", 1}, soon()).value().report, "first");
  const Outcome held = board_.conclude({4, "second", 0}, soon()).value();
  EXPECT_EQ(held.status, 3);
  EXPECT_EQ(held.report, "first");
  EXPECT_EQ(held.node_rank, 1);
  EXPECT_EQ(board_.await_outcome(soon()).value().status, 3);
}

TEST_F(JobBoards, TheJobEndsWellWhenTheLastNodeDoes) {
  std::thread waiter([&] { EXPECT_EQ(board_.await_outcome(soon()).value().status, 0); });
  EXPECT_TRUE(board_.node_done(2, soon()));
  EXPECT_FALSE(store_->check({"muster/run/run/outcome"}, soon()).value());
  EXPECT_TRUE(board_.node_done(2, soon()));
  waiter.join();
}

TEST_F(JobBoards, TheLastToLeaveIsNoticed) {
  std::thread root([&] { EXPECT_TRUE(board_.await_all_left(soon())); });
  EXPECT_TRUE(board_.leave(2, soon()));
  EXPECT_TRUE(board_.leave(2, soon()));
  root.join();
}

TEST_F(JobBoards, AnExitCanBeReadByOthers) {
  EXPECT_TRUE(board_.publish_exit({3, "b", 812, 0, 9}, soon()));
  const std::string text = to_string(store_->get("muster/run/run/exit/3", soon()).value());
  EXPECT_THAT(text, HasSubstr("\"signal\":9"));
  EXPECT_THAT(text, HasSubstr("\"host\":\"b\""));
}

TEST_F(JobBoards, WhatIsNotOursInTheStoreIsAnError) {
  ASSERT_TRUE(store_->set("muster/run/run/job", as_bytes("\xff junk"), soon()));
  const auto joined = board_.join(node("h", 1, 1), 0, kPlenty);
  ASSERT_FALSE(joined);
  EXPECT_EQ(joined.error().code, ErrorCode::kProtocol);
  ASSERT_TRUE(store_->set("muster/run/run/outcome", as_bytes("[]"), soon()));
  EXPECT_EQ(board_.await_outcome(soon()).error().code, ErrorCode::kProtocol);
}

}  // namespace
}  // namespace muster
