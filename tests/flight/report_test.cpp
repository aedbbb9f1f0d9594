// Reports about ranks that are in different calls.
#include "muster/flight/report.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

Record record(Collective collective, uint64_t sequence, size_t count, const std::string& site,
              RecordState state = RecordState::kRunning) {
  Record result;
  result.call = {collective, Dtype::kFloat32, ReduceOp::kSum, 0, count, 0, sequence};
  result.site = site;
  result.state = state;
  return result;
}

RankState at(Rank rank, const Record& here) {
  RankState rank_state;
  rank_state.who = "rank " + std::to_string(rank) + " (host h, pid " + std::to_string(100 + rank) + ")";
  rank_state.known = true;
  rank_state.here = rank_state.last = here;
  return rank_state;
}

RankState before(Rank rank, const Record& last) {
  RankState rank_state = at(rank, last);
  rank_state.here.reset();
  return rank_state;
}

const Record kReduce = record(Collective::kAllReduce, 18, 12, "train.py:71");
const Record kBroadcast = record(Collective::kBroadcast, 18, 10, "train.py:80");
const Record kBarrier = record(Collective::kBarrier, 17, 0, "train.py:69", RecordState::kDone);

TEST(Report, NamesRanksThatDifferAndRanksThatAreMissing) {
  const Report report = compose_report(
      {at(0, kReduce), at(1, kReduce), at(2, kBroadcast), at(3, kReduce), at(4, kReduce), before(5, kBarrier)}, 0);
  EXPECT_EQ(report.text,
            "rank 2 is at broadcast #18 (float32[10], root 0) at train.py:80, the others at all_reduce #18 "
            "(float32[12], sum) at train.py:71; rank 5 (host h, pid 105) has not arrived, last seen at barrier #17 at "
            "train.py:69");
  EXPECT_TRUE(report.mismatch);
  EXPECT_EQ(report.culprit, 5);
}

TEST(Report, NamesBothOfTwoRanks) {
  const Report report = compose_report({at(0, kReduce), at(1, kBroadcast)}, 1);
  EXPECT_EQ(report.text,
            "rank 1 is at broadcast #18 (float32[10], root 0) at train.py:80, rank 0 at all_reduce #18 (float32[12], "
            "sum) at train.py:71");
  EXPECT_EQ(report.culprit, 0) << "no rank blames itself";
  EXPECT_EQ(compose_report({at(0, kReduce), at(1, kBroadcast)}, 0).culprit, 1);
}

TEST(Report, NamesSeveralRanksThatDiffer) {
  const Record shorter = record(Collective::kAllReduce, 18, 10, "train.py:71");
  const Report report = compose_report(
      {at(0, kBroadcast), at(1, kReduce), at(2, shorter), at(3, shorter), at(4, kReduce), at(5, kReduce)}, 0);
  EXPECT_EQ(report.text,
            "rank 0 is at broadcast #18 (float32[10], root 0) at train.py:80, ranks 2, 3 at all_reduce #18 "
            "(float32[10], sum) at train.py:71, the others at all_reduce #18 (float32[12], sum) at train.py:71");
}

TEST(Report, NamesRanksInAnEarlierCall) {
  const Record earlier = record(Collective::kAllReduce, 17, 8, "train.py:60");
  const Report report = compose_report({at(0, kReduce), at(1, kReduce), before(2, earlier), before(3, earlier)}, 0);
  EXPECT_EQ(
      report.text,
      "ranks 0, 1 are at all_reduce #18 (float32[12], sum) at train.py:71; ranks 2, 3 are still in all_reduce #17 "
      "(float32[8], sum) at train.py:60");
  EXPECT_FALSE(report.mismatch);
  EXPECT_EQ(report.culprit, 2);
}

TEST(Report, NamesIdleAndSilentRanks) {
  RankState idle = before(1, kBarrier);
  idle.last.reset();
  RankState silent, unknown;
  silent.who = "rank 2 (host b, pid 812)";
  silent.silent = true;
  const Report report = compose_report({at(0, kReduce), idle, silent, unknown}, 0);
  EXPECT_EQ(report.text,
            "rank 0 is at all_reduce #18 (float32[12], sum) at train.py:71; rank 1 (host h, pid 101) has made no call "
            "yet; rank 2 (host b, pid 812) does not answer");
  EXPECT_EQ(report.culprit, 1);
}

TEST(Report, NamesAStoppedRankBeforeAllOthers) {
  RankState stopped = at(1, kReduce);
  stopped.stopped = true;
  const Report in_call = compose_report({at(0, kReduce), stopped}, 0);
  EXPECT_EQ(in_call.text,
            "rank 1 (host h, pid 101) is stopped, by a signal or a debugger, in all_reduce #18 (float32[12], sum) at "
            "train.py:71");
  EXPECT_EQ(in_call.culprit, 1);
  RankState late = before(2, kBarrier);
  late.stopped = true;
  const Report on_the_way = compose_report({at(0, kReduce), before(1, kBarrier), late}, 0);
  EXPECT_EQ(on_the_way.text,
            "rank 0 is at all_reduce #18 (float32[12], sum) at train.py:71; rank 1 (host h, pid 101) has not arrived, "
            "last seen at barrier #17 at train.py:69; rank 2 (host h, pid 102) is stopped, by a signal or a debugger, "
            "last seen at barrier #17 at train.py:69");
  EXPECT_EQ(on_the_way.culprit, 2);
}

TEST(Report, IsSilentWhenAllAreInTheSameCall) {
  EXPECT_EQ(compose_report({at(0, kReduce), at(1, kReduce)}, 0).text, "");
}

TEST(Report, ListsRanks) {
  EXPECT_EQ(list_ranks({3}), "rank 3");
  EXPECT_EQ(list_ranks({0, 1, 2, 5, 7, 8}), "ranks 0-2, 5, 7, 8");
}

}  // namespace
}  // namespace muster
