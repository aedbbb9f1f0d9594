// Tests of FailureDetector and Diagnosis without a real group.
#include <gtest/gtest.h>

#include "muster/group/engine/diagnosis.h"
#include "muster/group/engine/failure_detector.h"
#include "muster/group/shutdown_errors.h"

namespace muster {
namespace {

constexpr uint64_t kNoSuchGroup = 12345;

class FailureTest : public testing::Test {
 protected:
  FailureTest() {
    for (Rank rank = 0; rank < 3; ++rank) members_.push_back({.rank = rank, .size = 3, .pid = 100 + rank, .host = "b"});
  }
  static Error lost(Rank rank) { return {ErrorCode::kPeerLost, "rank " + std::to_string(rank) + " died", rank, {}}; }
  static Call all_reduce(uint64_t sequence) {
    return {Collective::kAllReduce, Dtype::kFloat32, ReduceOp::kSum, 0, 12, 0, sequence};
  }
  void receive_call(Rank rank, const Call& call) {
    const auto packed = call.pack();
    diagnosis_.on_peer_call(rank, {reinterpret_cast<const uint8_t*>(packed.data()), sizeof(packed)});
  }

  const std::unique_ptr<Loop> loop_ = Loop::create().value();
  LinkTable links_{*loop_, LinkIdentity{0, 3, "test", 0, {}}, 1};
  FailureDetector detector_{*loop_, links_};
  std::vector<RankInfo> members_;
  const GroupSpec spec_{0, 3, "test", 0};
  Diagnosis diagnosis_{spec_, members_, kNoSuchGroup, false, detector_};
  const std::vector<Link*> no_links_ = std::vector<Link*>(3, nullptr);
};

using FailureDetectorTest = FailureTest;
using DiagnosisTest = FailureTest;

TEST_F(FailureDetectorTest, KeepsTheFirstFailure) {
  EXPECT_FALSE(detector_.interrupted());
  detector_.on_lost(2, lost(2));
  detector_.on_lost(1, lost(1));
  EXPECT_TRUE(detector_.interrupted());
  EXPECT_EQ(detector_.failure()->rank, 2);
  EXPECT_EQ(detector_.lost(1)->rank, 1);
  EXPECT_EQ(detector_.lost(0), nullptr);
}

TEST_F(FailureDetectorTest, OrderlyLeaveIsNoFailure) {
  detector_.on_lost(1, has_left("rank 1", 1));
  EXPECT_FALSE(detector_.interrupted());
  ASSERT_NE(detector_.lost(1), nullptr);
  EXPECT_EQ(detector_.lost(1)->code, ErrorCode::kLeft);
}

TEST_F(FailureDetectorTest, KeepsTheFirstRequestToAbort) {
  detector_.request_abort(Error{ErrorCode::kAborted, "first", kNoRank, {}});
  detector_.request_abort(Error{ErrorCode::kAborted, "second", kNoRank, {}});
  EXPECT_TRUE(detector_.interrupted());
  EXPECT_EQ(detector_.interruption()->message, "first");
  detector_.fail(lost(1));
  EXPECT_EQ(detector_.interruption()->rank, 1) << "a failure comes before a request";
}

TEST_F(FailureDetectorTest, ShutsDownOnce) {
  detector_.shut_down(lost(1));
  detector_.shut_down(lost(2));
  EXPECT_TRUE(detector_.is_shut_down());
  EXPECT_EQ(detector_.failure()->rank, 1);
  EXPECT_EQ(detector_.failure()->phase, GroupPhase::kRunning);
}

TEST_F(FailureDetectorTest, DistinguishesAReportFromSilence) {
  EXPECT_FALSE(detector_.wait_for_report());
  loop_->post([this] { detector_.fail(lost(1)); });
  EXPECT_TRUE(detector_.wait_for_report());
}

TEST_F(DiagnosisTest, NamesTheAwaitedRanksWhenNothingElseIsKnown) {
  const Call call = all_reduce(7);
  diagnosis_.begin(call);
  const Error error = diagnosis_.timeout_error({2}, no_links_);
  EXPECT_EQ(error.code, ErrorCode::kTimeout);
  EXPECT_EQ(error.rank, 2);
  EXPECT_NE(error.message.find("rank 2 (host b, pid 102)"), std::string::npos) << error.message;
}

TEST_F(DiagnosisTest, PrefersTheReportOfAPeer) {
  detector_.fail(lost(1));
  EXPECT_EQ(diagnosis_.timeout_error({2}, no_links_).rank, 1);
}

TEST_F(DiagnosisTest, FindsAPeerInAnotherCall) {
  const Call call = all_reduce(7);
  diagnosis_.begin(call);
  receive_call(2, call);
  EXPECT_FALSE(detector_.failure()) << "the same call";
  receive_call(2, {Collective::kBroadcast, Dtype::kFloat32, ReduceOp::kSum, 0, 10, 0, 7});
  ASSERT_TRUE(detector_.failure());
  EXPECT_EQ(detector_.failure()->code, ErrorCode::kMismatch);
  EXPECT_NE(detector_.failure()->message.find("broadcast #7"), std::string::npos) << detector_.failure()->message;
}

TEST_F(DiagnosisTest, IgnoresALaterCallOfAPeer) {
  const Call call = all_reduce(7);
  diagnosis_.begin(call);
  receive_call(2, {Collective::kBroadcast, Dtype::kFloat32, ReduceOp::kSum, 0, 10, 0, 8});
  EXPECT_FALSE(detector_.failure());
}

TEST_F(DiagnosisTest, IgnoresAMessageOfAnotherLength) {
  const Call call = all_reduce(7);
  diagnosis_.begin(call);
  const uint8_t byte = 1;
  diagnosis_.on_peer_call(2, {&byte, 1});
  EXPECT_FALSE(detector_.failure());
}

TEST_F(DiagnosisTest, AddsNothingOutsideACall) {
  Error error{ErrorCode::kTimeout, "late", 2, {}};
  EXPECT_FALSE(diagnosis_.explain(error));
  EXPECT_EQ(error.message, "late");
}

}  // namespace
}  // namespace muster
