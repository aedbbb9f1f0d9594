#include "contract/link_contract.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "muster/base/random.h"

namespace muster {

std::string pattern(size_t bytes, uint64_t seed) {
  std::string text(bytes, '\0');
  Random random(seed);
  size_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    const uint64_t word = random.next();
    std::copy_n(reinterpret_cast<const char*>(&word), 8, text.data() + i);
  }
  for (; i < bytes; ++i) text[i] = static_cast<char>(random.next());
  return text;
}

void send_text(Link& link, std::string_view text, Completion completion) {
  const ConstSegment segment{text.data(), text.size()};
  link.send({&segment, 1}, std::move(completion));
}

void receive_text(Link& link, std::string& into, Completion completion) {
  const Segment segment{into.data(), into.size()};
  link.receive({&segment, 1}, std::move(completion));
}

namespace {

constexpr size_t kBig = size_t{64} << 20;
constexpr size_t kTooMuch = size_t{24} << 20;  // more than all buffers on the way can hold

/// Moves a whole text over a link, in operations and segments of random sizes.
class RandomTransfer {
 public:
  RandomTransfer(Link& from, Link& to, const std::string& text, uint64_t seed)
      : from_(from), to_(to), text_(text), received_(text.size(), '\0'), random_(seed) {
    send_next();
    receive_next();
  }
  bool done() const { return sent_ == text_.size() && landed_ == text_.size(); }
  bool failed() const { return failed_; }
  const std::string& received() const { return received_; }

 private:
  size_t some(size_t left) { return std::min<size_t>(left, random_.below(uint64_t{1} << random_.between(1, 18))); }

  template <class AnySegment, class Pointer>
  std::vector<AnySegment> cut(Pointer base, size_t left, size_t& total) {
    std::vector<AnySegment> segments(random_.between(1, 5));
    total = 0;
    for (AnySegment& segment : segments) {
      segment = {base + total, some(left - total)};
      total += segment.bytes;
    }
    return segments;
  }

  void send_next() {
    if (sent_ == text_.size()) return;
    size_t bytes;
    const auto segments = cut<ConstSegment>(text_.data() + sent_, text_.size() - sent_, bytes);
    from_.send(segments, [this, bytes](Result<> result) {
      failed_ = failed_ || !result;
      sent_ += bytes;
      if (result) send_next();
    });
  }
  void receive_next() {
    if (landed_ == text_.size()) return;
    size_t bytes;
    const auto segments = cut<Segment>(received_.data() + landed_, text_.size() - landed_, bytes);
    to_.receive(segments, [this, bytes](Result<> result) {
      failed_ = failed_ || !result;
      landed_ += bytes;
      if (result) receive_next();
    });
  }

  Link& from_;
  Link& to_;
  const std::string& text_;
  std::string received_;
  Random random_;
  size_t sent_ = 0, landed_ = 0;
  bool failed_ = false;
};

TEST_P(LinkContract, HasTheRankOfItsPeer) {
  EXPECT_EQ(left().peer().rank, 1);
  EXPECT_EQ(right().peer().rank, 0);
  EXPECT_NE(left().peer().host, "");
  EXPECT_GT(left().peer().pid, 0);
  EXPECT_STREQ(left().kind(), right().kind());
  EXPECT_TRUE(left().is_open());
}

TEST_P(LinkContract, CarriesBytesWhicheverEndStartsFirst) {
  std::string hello(5, '\0'), answer(6, '\0');
  Outcome sent, received, answered, answer_received;
  receive_text(right(), hello, received.record());
  EXPECT_FALSE(received.done());
  send_text(left(), "hello", sent.record());
  run_until([&] { return sent.done() && received.done(); });
  EXPECT_EQ(hello, "hello");
  send_text(right(), "answer", answered.record());
  ASSERT_TRUE(pair_->settle());
  receive_text(left(), answer, answer_received.record());
  run_until([&] { return answered.done() && answer_received.done(); });
  EXPECT_EQ(answer, "answer");
  EXPECT_TRUE(sent.ok() && received.ok() && answered.ok() && answer_received.ok());
}

TEST_P(LinkContract, KeepsBytesInOrderInPiecesOfAnySize) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    const std::string text = pattern(3'000'001, seed);
    RandomTransfer transfer(left(), right(), text, seed);
    run_until([&] { return transfer.done() || transfer.failed(); });
    ASSERT_FALSE(transfer.failed());
    ASSERT_TRUE(transfer.received() == text) << "seed " << seed;
  }
}

TEST_P(LinkContract, CarriesBothDirectionsAtOnce) {
  const std::string there = pattern(9'000'007, 1), back = pattern(9'000'011, 2);
  RandomTransfer one(left(), right(), there, 3), other(right(), left(), back, 4);
  run_until([&] { return (one.done() && other.done()) || one.failed() || other.failed(); });
  EXPECT_TRUE(one.received() == there);
  EXPECT_TRUE(other.received() == back);
}

TEST_P(LinkContract, Carries64MiBInOneOperation) {
  const std::string text = pattern(kBig);
  std::string into(kBig, '\0');
  Outcome sent, received;
  receive_text(right(), into, received.record());
  send_text(left(), text, sent.record());
  run_until([&] { return sent.done() && received.done(); });
  EXPECT_TRUE(sent.ok() && received.ok());
  EXPECT_TRUE(into == text);
}

TEST_P(LinkContract, EndsOperationsOfNoBytesAtOnce) {
  Outcome sent, received, none;
  send_text(left(), "", sent.record());
  std::string empty;
  receive_text(left(), empty, received.record());
  left().send({}, none.record());
  EXPECT_TRUE(sent.ok() && received.ok() && none.ok());
}

TEST_P(LinkContract, CompletesInOrderBehindEmptyOperations) {
  std::vector<int> order;
  std::string parts[3] = {std::string(1000, '\0'), "", std::string(7, '\0')};
  for (int i = 0; i < 3; ++i) {
    receive_text(right(), parts[i], [&order, i](Result<>) { order.push_back(i); });
  }
  EXPECT_TRUE(order.empty());
  const std::string text = pattern(1007);
  Outcome sent;
  send_text(left(), text, sent.record());
  run_until([&] { return order.size() == 3; });
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
  EXPECT_TRUE(parts[0] + parts[2] == text);
}

TEST_P(LinkContract, DoesNotQueueDataThatThePeerDoesNotReceive) {
  const std::string text = pattern(kBig);
  Outcome sent, received;
  send_text(left(), text, sent.record());
  ASSERT_TRUE(pair_->settle());
  EXPECT_FALSE(sent.done()) << "64 MiB vanished into buffers";
  std::string into(kBig, '\0');
  receive_text(right(), into, received.record());
  run_until([&] { return sent.done() && received.done(); });
  EXPECT_TRUE(into == text);
}

TEST_P(LinkContract, SleepsInEveryKindOfWait) {
  EXPECT_TRUE(pair_->settle()) << "idle";
  std::string byte(1, '\0'), into(1000, '\0');
  Outcome pending, first, sent;
  receive_text(left(), byte, pending.record());
  EXPECT_TRUE(pair_->settle()) << "waiting for a byte";
  const std::string text = pattern(kTooMuch);
  send_text(left(), text, sent.record());
  EXPECT_TRUE(pair_->settle()) << "full, and the peer does not receive";
  receive_text(right(), into, first.record());
  EXPECT_TRUE(pair_->settle()) << "received a part";
  EXPECT_TRUE(first.ok());
  pair_->left.reset();
  EXPECT_TRUE(pair_->settle()) << "gone, with bytes unread";
  receive_text(right(), into, first.record());
  EXPECT_TRUE(pair_->settle()) << "gone, with bytes unread, and a part of them received";
}

TEST_P(LinkContract, SendsThePeerTheCloseReason) {
  std::string into(10, '\0');
  Outcome pending, own, later, sent_later;
  Error seen;
  int closes = 0;
  right().on_close([&](const Error& why) { seen = why, ++closes; });
  receive_text(right(), into, pending.record());
  std::string own_into(3, '\0');
  receive_text(left(), own_into, own.record());
  Error reason{ErrorCode::kTimeout, "rank 7 did not answer", 7, "all_reduce #41"};
  reason.phase = GroupPhase::kRunning;
  left().close(reason);
  EXPECT_FALSE(left().is_open());
  EXPECT_TRUE(own.done());
  EXPECT_EQ(own.result.error().message, "rank 7 did not answer");
  run_until([&] { return pending.done() && closes > 0; });
  receive_text(right(), into, later.record());
  send_text(right(), "x", sent_later.record());
  run_until([&] { return later.done() && sent_later.done(); });
  for (const Outcome* outcome : {&pending, &later, &sent_later}) {
    ASSERT_EQ(outcome->calls, 1);
    ASSERT_FALSE(outcome->result);
    EXPECT_EQ(outcome->result.error().code, ErrorCode::kTimeout);
    EXPECT_EQ(outcome->result.error().message, "rank 7 did not answer");
    EXPECT_EQ(outcome->result.error().rank, 7);
    EXPECT_EQ(outcome->result.error().context, "all_reduce #41");
    EXPECT_EQ(outcome->result.error().phase, GroupPhase::kRunning);
    EXPECT_EQ(outcome->result.error().reported_by, 0);
  }
  EXPECT_EQ(closes, 1);
  EXPECT_EQ(seen.rank, 7);
  EXPECT_FALSE(right().is_open());
}

TEST_P(LinkContract, SendsTheCloseReasonWhenTheStreamIsFullBothWays) {
  const std::string text = pattern(kTooMuch);
  Outcome left_send, right_send, received;
  send_text(left(), text, left_send.record());
  send_text(right(), text, right_send.record());
  ASSERT_TRUE(pair_->settle());
  left().close(Error{ErrorCode::kPeerLost, "rank 5 died", 5, {}});
  ASSERT_EQ(left_send.calls, 1);
  EXPECT_FALSE(left_send.result);
  std::string into(kTooMuch, '\0');
  receive_text(right(), into, received.record());
  run_until([&] { return right_send.done() && received.done(); });
  ASSERT_FALSE(received.result);
  EXPECT_EQ(received.result.error().message, "rank 5 died");
  EXPECT_EQ(received.result.error().rank, 5);
  EXPECT_EQ(right_send.result.error().rank, 5);
}

TEST_P(LinkContract, DestructorClosesIt) {
  std::string into(10, '\0'), own_into(10, '\0');
  Outcome pending, own;
  receive_text(right(), into, pending.record());
  receive_text(left(), own_into, own.record());
  pair_->left.reset();
  ASSERT_EQ(own.calls, 1);
  EXPECT_EQ(own.result.error().code, ErrorCode::kAborted);
  run_until([&] { return pending.done(); });
  EXPECT_EQ(pending.result.error().code, ErrorCode::kAborted);
  EXPECT_EQ(pending.result.error().rank, 0);
  EXPECT_NE(pending.result.error().message.find("rank 0"), std::string::npos) << pending.result.error().message;
}

TEST_P(LinkContract, DeliversDataThatWasSentBeforeTheClose) {
  const std::string text = pattern(100'000);
  Outcome sent, received, behind;
  send_text(left(), text, sent.record());
  ASSERT_TRUE(pair_->settle());
  ASSERT_TRUE(sent.ok());
  pair_->left.reset();
  ASSERT_TRUE(pair_->settle());
  std::string into(text.size(), '\0'), more(1, '\0');
  receive_text(right(), into, received.record());
  run_until([&] { return received.done(); });
  EXPECT_TRUE(received.ok());
  EXPECT_TRUE(into == text);
  receive_text(right(), more, behind.record());
  run_until([&] { return behind.done(); });
  EXPECT_EQ(behind.result.error().code, ErrorCode::kAborted);
}

TEST_P(LinkContract, ReportsACloseBeforeTheFirstOperation) {
  pair_->left.reset();
  run_until([&] { return !right().is_open(); });
  int closes = 0;
  right().on_close([&](const Error& why) { closes += why.rank == 0 ? 1 : 100; });
  run_until([&] { return closes > 0; });
  EXPECT_EQ(closes, 1);
}

TEST_P(LinkContract, CallsItsOwnCloseHandlerOnALocalClose) {
  int closes = 0;
  left().on_close([&](const Error&) { ++closes; });
  left().close(Error{ErrorCode::kAborted, "enough", kNoRank, {}});
  left().close(Error{ErrorCode::kAborted, "twice", kNoRank, {}});
  run_until([&] { return closes > 0; });
  EXPECT_EQ(closes, 1);
}

TEST_P(LinkContract, FailsEachPendingOperationOnceOnClose) {
  std::vector<std::string> into(100, std::string(10, '\0'));
  std::vector<Outcome> outcomes(100);
  for (size_t i = 0; i < into.size(); ++i) receive_text(right(), into[i], outcomes[i].record());
  right().close(Error{ErrorCode::kAborted, "enough", kNoRank, {}});
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.calls, 1);
    EXPECT_FALSE(outcome.result);
  }
}

TEST_P(LinkContract, MayBeDestroyedByItsOwnCompletion) {
  std::string first(1, '\0'), second(1, '\0');
  Outcome pending;
  receive_text(right(), first, [&](Result<>) { pair_->right.reset(); });
  receive_text(right(), second, pending.record());
  Outcome sent;
  send_text(left(), "ab", sent.record());
  run_until([&] { return pending.done(); });
  EXPECT_EQ(pair_->right, nullptr);
  EXPECT_EQ(pending.calls, 1);
}

TEST_P(LinkContract, MayBeDestroyedByItsCloseHandler) {
  right().on_close([&](const Error&) { pair_->right.reset(); });
  pair_->left.reset();
  run_until([&] { return pair_->right == nullptr; });
}

TEST_P(LinkContract, MayBeClosedByACompletionThatRanInline) {
  Outcome behind;
  send_text(left(), "x", [&](Result<>) {
    left().close(Error{ErrorCode::kAborted, "enough", kNoRank, {}});
    send_text(left(), "y", behind.record());
  });
  run_until([&] { return behind.done(); });
  EXPECT_FALSE(behind.result);
}

TEST_P(LinkContract, AnswersPingsBesideTheBytes) {
  const std::string text = pattern(300'000);
  std::string got(text.size(), '\0');
  Outcome sent, received;
  int pongs = 0;
  left().ping([&] { ++pongs; });
  send_text(left(), text, sent.record());
  left().ping([&] { ++pongs; });
  right().ping([&] { ++pongs; });
  receive_text(right(), got, received.record());
  run_until([&] { return sent.done() && received.done() && pongs == 3; });
  EXPECT_EQ(got, text);
  right().ping([&] { ++pongs; });
  run_until([&] { return pongs == 4; });
}

TEST_P(LinkContract, AnswersAPingBehindUnreceivedBytes) {
  const std::string text = pattern(10'000);
  std::string got(text.size(), '\0');
  Outcome sent, received;
  int pongs = 0;
  send_text(left(), text, sent.record());
  left().ping([&] { ++pongs; });
  send_text(left(), "more", [](Result<>) {});
  left().ping([&] { ++pongs; });
  run_until([&] { return pongs == 2; });
  receive_text(right(), got, received.record());
  run_until([&] { return received.done(); });
  EXPECT_EQ(got, text);
  std::string tail(4, '\0');
  Outcome last;
  receive_text(right(), tail, last.record());
  run_until([&] { return last.done(); });
  EXPECT_EQ(tail, "more");
}

TEST_P(LinkContract, DeliversControlMessagesBesideUnreceivedBytes) {
  const std::string text = pattern(10'000);
  std::string got(text.size(), '\0');
  Outcome sent, received;
  std::vector<Bytes> notes;
  right().set_control_handler([&](ByteView message) { notes.emplace_back(message.begin(), message.end()); });
  left().send_control(Bytes{1, 2, 3});
  run_until([&] { return notes.size() == 1; });
  send_text(left(), text, sent.record());
  const Bytes longest(kMaxControlMessage, 7);
  left().send_control(longest);
  run_until([&] { return notes.size() == 2; });
  EXPECT_EQ(notes[0], (Bytes{1, 2, 3}));
  EXPECT_EQ(notes[1], longest);
  receive_text(right(), got, received.record());
  run_until([&] { return sent.done() && received.done(); });
  EXPECT_EQ(got, text);
}

TEST_P(LinkContract, NeverAnswersAPingOnceItEnded) {
  int pongs = 0;
  pair_->right.reset();
  left().ping([&] { ++pongs; });
  EXPECT_TRUE(pair_->settle());
  EXPECT_EQ(pongs, 0);
}

TEST_P(LinkContract, RunsInlineOperationsWithoutGrowingTheStack) {
  constexpr int kCount = 100'000, kBytes = kCount / 10 - 1;
  int sent = 0, received = 0;
  uintptr_t lowest = UINTPTR_MAX, highest = 0;
  const auto record_stack_depth = [&] {
    const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
    lowest = std::min(lowest, here);
    highest = std::max(highest, here);
  };
  std::function<void(Result<>)> send_next = [&](Result<> result) {
    ASSERT_TRUE(result);
    record_stack_depth();
    if (++sent < kCount) send_text(left(), sent % 10 == 0 ? "x" : "", send_next);
  };
  std::string byte(1, '\0');
  std::function<void(Result<>)> receive_next = [&](Result<> result) {
    ASSERT_TRUE(result);
    record_stack_depth();
    if (++received < kBytes) receive_text(right(), byte, receive_next);
  };
  receive_text(right(), byte, receive_next);
  send_text(left(), "", send_next);
  run_until([&] { return sent == kCount && received == kBytes; });
  EXPECT_LT(highest - lowest, 64 << 10);
}

}  // namespace
}  // namespace muster
