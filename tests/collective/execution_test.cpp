#include "muster/collective/schedule/execution.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "collective/allocations.h"
#include "collective/trial.h"

namespace muster::test {
namespace {

/// One end of a pair of links that complete operations inline: a send at once, a receive as soon as its bytes have
/// arrived.
class InlineLink : public Link {
 public:
  static void join(InlineLink& a, InlineLink& b) {
    a.other_ = &b;
    b.other_ = &a;
  }

  void send(std::span<const ConstSegment> from, Completion completion) override {
    if (ended_) return completion(tl::unexpected(*ended_));
    for (const ConstSegment& segment : from) {
      const auto* data = static_cast<const uint8_t*>(segment.data);
      other_->inbox_.insert(other_->inbox_.end(), data, data + segment.bytes);
    }
    completion({});
    other_->deliver();
  }
  void receive(std::span<const Segment> into, Completion completion) override {
    if (ended_) return completion(tl::unexpected(*ended_));
    receives_.push_back({into[0], std::move(completion)});
    deliver();
  }
  void close(Error why) override {
    ended_ = std::move(why);
    while (pending() > 0) pop()(tl::unexpected(*ended_));
  }
  void on_close(std::function<void(const Error&)>) override {}
  void ping(std::function<void()> pong) override { pong(); }
  void send_control(ByteView) override {}
  void set_control_handler(std::function<void(ByteView)>) override {}
  bool is_open() const override { return !ended_; }
  const Peer& peer() const override { return peer_; }
  const char* kind() const override { return "inline"; }
  size_t pending() const { return receives_.size() - done_; }

 private:
  struct Pending {
    Segment into;
    Completion completion;
  };

  Completion pop() {
    Completion completion = std::move(receives_[done_++].completion);
    if (pending() == 0) {
      receives_.clear();
      done_ = 0;
    }
    return completion;
  }

  void deliver() {
    while (pending() > 0 && inbox_.size() - taken_ >= receives_[done_].into.bytes) {
      const Segment into = receives_[done_].into;
      std::copy_n(inbox_.begin() + static_cast<ptrdiff_t>(taken_), into.bytes, static_cast<uint8_t*>(into.data));
      taken_ += into.bytes;
      if (taken_ == inbox_.size()) {
        inbox_.clear();
        taken_ = 0;
      }
      pop()({});
    }
  }

  InlineLink* other_ = nullptr;
  std::vector<uint8_t> inbox_;
  size_t taken_ = 0, done_ = 0;  // counts of consumed inbox bytes and of completed receives
  std::vector<Pending> receives_;
  std::optional<Error> ended_;
  Peer peer_;
};

const Algorithm& kRing = algorithm(Collective::kAllReduce, "ring");

/// Both ranks of a trial over inline links. Can run several times; `reports` collects the results of the runs.
struct Pair {
  explicit Pair(Trial& of) : trial(of), prepared{PreparedSchedule(of.schedule(0)), PreparedSchedule(of.schedule(1))} {
    InlineLink::join(a, b);
    reports.reserve(16);
  }
  void start(Rank rank, const Call* call = nullptr) {
    prepared[rank].start(
        links[rank], trial.buffers(rank), trial.scratch(rank),
        [this](Result<> result) { reports.push_back(std::move(result)); }, call);
  }
  void run(const Call* of_first = nullptr, const Call* of_second = nullptr) {
    start(0, of_first);
    start(1, of_second);
  }
  bool succeeded() const {
    return std::ranges::all_of(reports, [](const Result<>& report) { return report.has_value(); });
  }

  Trial& trial;
  PreparedSchedule prepared[2];
  InlineLink a, b;
  std::vector<Link*> links[2] = {{nullptr, &a}, {&b, nullptr}};
  std::vector<Result<>> reports;
};

Error lost() { return {.code = ErrorCode::kPeerLost, .message = "rank 1 closed its link", .rank = 1}; }

TEST(PreparedSchedule, CompletesInsideStartWithNothingToWaitFor) {
  Trial trial(kRing, {.size = 1, .count = 5, .in_place = false});
  PreparedSchedule prepared(trial.schedule(0));
  int reports = 0;
  prepared.start({}, trial.buffers(0), trial.scratch(0), [&](Result<> result) {
    EXPECT_TRUE(result.has_value());
    ++reports;
  });
  EXPECT_FALSE(prepared.running());
  EXPECT_EQ(reports, 1);
  EXPECT_EQ(trial.fault(), "");
}

TEST(PreparedSchedule, RunsLongInlineChainsInConstantStack) {
  Trial trial(kRing, {.size = 2, .count = 300'000, .chunk_bytes = 8});
  Pair pair(trial);
  pair.run();
  EXPECT_EQ(pair.reports.size(), 2U);
  EXPECT_TRUE(pair.succeeded());
  EXPECT_EQ(trial.fault(), "");
}

TEST(PreparedSchedule, ReportsTheFirstErrorOnceAndStops) {
  Trial trial(kRing, {.size = 2, .count = 1000, .chunk_bytes = 64});
  Pair pair(trial);
  pair.start(0);
  EXPECT_TRUE(pair.prepared[0].running());
  EXPECT_GT(pair.a.pending(), 0U);
  pair.a.close(lost());
  ASSERT_EQ(pair.reports.size(), 1U);
  ASSERT_FALSE(pair.reports[0].has_value());
  EXPECT_EQ(pair.reports[0].error().code, ErrorCode::kPeerLost);
  EXPECT_EQ(pair.reports[0].error().rank, 1);
  EXPECT_FALSE(pair.prepared[0].running());
  EXPECT_EQ(pair.a.pending(), 0U);
}

TEST(PreparedSchedule, NamesTheRanksThatItWaitsFor) {
  Trial trial(kRing, {.size = 2, .count = 10});
  Pair pair(trial);
  EXPECT_THAT(pair.prepared[0].waiting_for(), testing::IsEmpty());
  pair.start(0);
  EXPECT_THAT(pair.prepared[0].waiting_for(), testing::ElementsAre(1));
  pair.start(1);
  EXPECT_THAT(pair.prepared[0].waiting_for(), testing::IsEmpty());
}

TEST(PreparedSchedule, ReportsALinkThatIsClosedAlready) {
  Trial trial(kRing, {.size = 2, .count = 10});
  Pair pair(trial);
  pair.a.close(lost());
  pair.start(0);
  ASSERT_EQ(pair.reports.size(), 1U);
  EXPECT_FALSE(pair.reports[0].has_value());
}

TEST(PreparedSchedule, MayBeDestroyedByTheReportOfItsSuccess) {
  Trial trial(kRing, {.size = 2, .count = 100});
  InlineLink a, b;
  InlineLink::join(a, b);
  Link* const links[2][2] = {{nullptr, &a}, {&b, nullptr}};
  std::unique_ptr<PreparedSchedule> prepared[2];
  for (Rank rank = 0; rank < 2; ++rank) {
    prepared[rank] = std::make_unique<PreparedSchedule>(trial.schedule(rank));
    prepared[rank]->start(links[rank], trial.buffers(rank), trial.scratch(rank),
                          [&prepared, rank](Result<>) { prepared[rank].reset(); });
  }
  EXPECT_EQ(prepared[0], nullptr);
  EXPECT_EQ(prepared[1], nullptr);
  EXPECT_EQ(trial.fault(), "");
}

TEST(PreparedSchedule, AllocatesNothingInASecondRun) {
  Trial trial(kRing, {.size = 2, .count = 1000, .chunk_bytes = 512});
  Pair pair(trial);
  const Call call{.collective = Collective::kAllReduce, .count = 1000};
  pair.run(&call, &call);
  const size_t before = allocations();
  pair.run(&call, &call);
  EXPECT_EQ(allocations(), before);
  EXPECT_TRUE(pair.succeeded());
}

TEST(PreparedSchedule, RunsAgainWithNewBufferContents) {
  Trial trial(algorithm(Collective::kBroadcast, "binomial"), {.size = 2, .count = 9});
  Pair pair(trial);
  for (int run = 0; run < 3; ++run) {
    trial.memory(1, BufferKind::kOutput)[5] ^= 0xff;
    EXPECT_NE(trial.fault(), "");
    pair.run();
    EXPECT_EQ(trial.fault(), "");
  }
}

TEST(PreparedSchedule, SendsTheCallHeaderAndNamesPeersThatDiffer) {
  Trial trial(kRing, {.size = 2, .count = 9});
  Pair pair(trial);
  const Call call{.collective = Collective::kAllReduce, .count = 9, .sequence = 4};
  Call other = call;
  other.dtype = Dtype::kFloat32;
  pair.run(&call, &call);
  EXPECT_TRUE(pair.succeeded());
  EXPECT_EQ(trial.fault(), "");
  pair.run(&call, &other);
  ASSERT_FALSE(pair.reports.back().has_value());
  EXPECT_EQ(pair.reports.back().error().code, ErrorCode::kMismatch);
  EXPECT_THAT(pair.reports.back().error().message,
              testing::AllOf(testing::HasSubstr("all_reduce #4 (uint8[9], sum)"),
                             testing::HasSubstr("all_reduce #4 (float32[9], sum)")));
}

TEST(PreparedSchedule, MayBeMovedBetweenRuns) {
  Trial trial(kRing, {.size = 2, .count = 9});
  Pair pair(trial);
  PreparedSchedule elsewhere = std::move(pair.prepared[0]);
  pair.prepared[0] = std::move(elsewhere);
  EXPECT_THAT(pair.prepared[0].peers(), testing::ElementsAre(1));
  pair.run();
  EXPECT_EQ(trial.fault(), "");
}

TEST(PreparedScheduleDeathTest, ChecksItsLinksAndScratch) {
  Trial trial(kRing, {.size = 2, .count = 100});
  Link* none[] = {nullptr, nullptr};
  InlineLink link;
  Link* links[] = {nullptr, &link};
  PreparedSchedule prepared(trial.schedule(0));
  const auto start = [&](std::span<Link* const> with, MutableByteView scratch) {
    prepared.start(with, trial.buffers(0), scratch, [](Result<>) {});
  };
  EXPECT_DEATH(start(none, trial.scratch(0)), "link that is not there");
  EXPECT_DEATH(start(links, {}), "too little scratch");
}

}  // namespace
}  // namespace muster::test
