// Groups over MPI. A launcher of MPI starts this program in several processes; each runs all tests.
#include "muster/mpi/group.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <numeric>

#include "contract/group_contract.h"

namespace muster {
namespace {

using testing::HasSubstr;

int groups = 0;  // so far, at each rank: in the names of groups

std::unique_ptr<Group> form(int size, Duration timeout = 60s) {
  std::vector<Rank> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  GroupOptions options;
  options.timeout = timeout;
  auto group = mpi::form_group(ranks, fmt::format("test{}", ++groups), options);
  EXPECT_TRUE(group) << group.error().to_string();
  return group ? std::move(*group) : nullptr;
}

const mpi::Position& position() {
  static const mpi::Position found = mpi::position().value();
  return found;
}

/// Ranks above `size` do nothing.
void run_here(int size, const std::function<void(Group&)>& body) {
  if (position().rank >= size) return static_cast<void>(++groups);
  const auto group = form(size);
  ASSERT_TRUE(group);
  body(*group);
  ASSERT_TRUE(group->barrier().result());
}

const GroupKind kMpi{"Mpi", [](Rank) { return GroupOptions{}; }, run_here};
INSTANTIATE_TEST_SUITE_P(Mpi, GroupContract, group_sizes(kMpi, {1, 2, 3}), group_name);

BufferView view(std::vector<int32_t>& data) { return {data.data(), data.size(), Dtype::kInt32}; }

TEST(MpiGroup, KnowsItsPlace) {
  const auto group = form(position().size);
  ASSERT_TRUE(group);
  EXPECT_EQ(group->membership().rank, position().rank);
  EXPECT_EQ(group->membership().size, position().size);
  EXPECT_EQ(group->transport(), "mpi");
  EXPECT_FALSE(position().library.empty());
  std::vector<int32_t> ids(static_cast<size_t>(position().size) * 2);
  uint64_t id = group->id();
  ASSERT_TRUE(group->all_gather({&id, 2, Dtype::kInt32}, view(ids)).result());
  for (size_t i = 2; i < ids.size(); ++i) EXPECT_EQ(ids[i], ids[i - 2]);
}

TEST(MpiGroup, MessagesArriveInOrderAndByTag) {
  const auto group = form(2 <= position().size ? position().size : 1);
  ASSERT_TRUE(group);
  const Rank rank = group->membership().rank;
  const int size = group->membership().size;
  const Rank next = (rank + 1) % size, before = (rank + size - 1) % size;
  for (const size_t count : {0, 1, 1000, 300'000}) {
    std::vector<int32_t> first(count, rank), second(count, rank + 100), got_first(count, -1), got_second(count, -1);
    const Work sent_first = group->send(view(first), next, 7), sent_second = group->send(view(second), next, 8);
    ASSERT_TRUE(group->receive(view(got_second), before, 8).wait());
    const Work received = group->receive(view(got_first), kAnyRank, 7);
    ASSERT_TRUE(received.wait());
    EXPECT_EQ(received.source(), before);
    EXPECT_EQ(std::count(got_first.begin(), got_first.end(), before), static_cast<int64_t>(count));
    EXPECT_EQ(std::count(got_second.begin(), got_second.end(), before + 100), static_cast<int64_t>(count));
    ASSERT_TRUE(sent_first.wait());
    ASSERT_TRUE(sent_second.wait());
  }
}

TEST(MpiGroup, AReceiveWithoutAMessageTimesOutAndTheGroupStaysUsable) {
  const auto group = form(position().size);
  ASSERT_TRUE(group);
  std::vector<int32_t> data(10);
  const auto result = group->receive(view(data), 0, 1, {.timeout = 50ms}).wait();
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kTimeout);
  EXPECT_THAT(result.error().to_string(), HasSubstr("receive from rank 0 with tag 1 (int32[10])"));
  ASSERT_TRUE(group->barrier().result());
}

TEST(MpiGroup, AReceiveOfAnotherLengthIsAMismatch) {
  const auto group = form(position().size);
  ASSERT_TRUE(group);
  const Rank rank = group->membership().rank;
  std::vector<int32_t> longer(20), shorter(10), right(15);
  for (std::vector<int32_t>* other : {&longer, &shorter}) {
    const Work sent = group->send(view(right), rank, 3);
    const auto result = group->receive(view(*other), rank, 3).wait();
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kMismatch) << result.error().to_string();
    EXPECT_TRUE(sent.wait());
  }
  ASSERT_TRUE(group->barrier().result());
}

TEST(MpiGroup, WrongArgumentsAreErrors) {
  const auto group = form(position().size);
  ASSERT_TRUE(group);
  std::vector<int32_t> data(10);
  EXPECT_THAT(group->send(view(data), 99, 0).wait().error().to_string(), HasSubstr("the group's ranks are 0 to"));
  EXPECT_THAT(group->broadcast(view(data), 99).wait().error().to_string(), HasSubstr("root 99"));
  EXPECT_THAT(mpi::form_group({0, 0}, "twice", {}).error().to_string(), HasSubstr("rank 0 is listed twice"));
  const std::vector<Rank> others{(position().rank + 1) % position().size};
  if (position().size > 1) {
    EXPECT_THAT(mpi::form_group(others, "others", {}).error().to_string(), HasSubstr("is not in the group"));
  }
  EXPECT_EQ(group->set_timeout(-1s).error().code, ErrorCode::kInvalidArgument);
  ASSERT_TRUE(group->barrier().result());
}

TEST(MpiGroup, SplitsWithoutTheRanksThatStayOutside) {
  const auto group = form(position().size);
  ASSERT_TRUE(group);
  const auto store = memory_store();  // MPI needs none
  const Rank rank = group->membership().rank;
  const auto part = group->split(*store, rank % 2, -rank, "parity");
  ASSERT_TRUE(part) << part.error().to_string();
  std::vector<int32_t> data{rank};
  ASSERT_TRUE((*part)->all_reduce(view(data), ReduceOp::kMax).result());
  EXPECT_EQ(data[0] % 2, rank % 2);
  EXPECT_EQ((*part)->membership().name,
            "test" + group->membership().name.substr(4) + "/parity/" + std::to_string(rank % 2));
  if (rank == 0) {
    const auto alone = group->split(*store, {0}, "alone");
    ASSERT_TRUE(alone) << alone.error().to_string();
    EXPECT_EQ((*alone)->membership().size, 1);
  }
  EXPECT_EQ(group->merge(*store, {0, 1, "merged", 0}).error().code, ErrorCode::kUnsupported);
}

TEST(MpiGroup, CallsAfterAnAbortFail) {
  const auto group = form(position().size);
  ASSERT_TRUE(group);
  ASSERT_TRUE(group->barrier().result());
  std::vector<int32_t> data(10);
  const Work pending = group->receive(view(data), 0, 5);
  group->abort({ErrorCode::kAborted, "the test ends it", kNoRank, {}});
  EXPECT_THAT(pending.wait().error().to_string(), HasSubstr("the test ends it"));
  EXPECT_THAT(group->barrier().wait().error().to_string(), HasSubstr("the test ends it"));
  EXPECT_THAT(group->send(view(data), 0, 5).wait().error().to_string(), HasSubstr("the test ends it"));
  EXPECT_FALSE(group->status());
}

TEST(MpiGroup, MessagesOfOneThreadGoOnWhileAnotherOneIsInACollective) {
  const auto group = form(position().size);
  ASSERT_TRUE(group);
  if (group->membership().size < 2) GTEST_SKIP() << "needs two ranks";
  std::vector<int32_t> data(1000, 1);
  if (group->membership().rank == 0) {
    // Rank 1 comes to the barrier only after it has this message.
    const Work barrier = group->barrier({.async = true});
    ASSERT_TRUE(group->send(view(data), 1, 1).wait());
    ASSERT_TRUE(barrier.wait());
  } else {
    if (group->membership().rank == 1) {
      ASSERT_TRUE(group->receive(view(data), 0, 1).wait());
    }
    ASSERT_TRUE(group->barrier().result());
  }
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) {
  const auto position = muster::mpi::position();
  if (!position) {
    fmt::print(stderr, "{}\n", position.error().to_string());
    return 2;
  }
  if (position->rank != 0) GTEST_FLAG_SET(brief, 1);  // one rank lists the tests; the others say what fails
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
