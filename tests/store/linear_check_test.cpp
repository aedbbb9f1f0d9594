#include "store/linear_check.h"

#include "muster/base/random.h"
#include "store/expect.h"
#include "store/store_model.h"

namespace muster {
namespace {

// A history that a test writes by hand. Each entry has the client, the start, the end, the request and the reply.
class HandWrittenHistory {
 public:
  HandWrittenHistory& then(int client, int64_t from, int64_t to, Request request, Reply reply = {}) {
    history_.push_back({client, std::move(request), {from}, {to}, std::move(reply)});
    return *this;
  }
  HandWrittenHistory& lost(int client, int64_t from, Request request) {
    history_.push_back({client, std::move(request), {from}, {from}});
    return *this;
  }
  Result<> verdict() const { return check_history(history_); }

 private:
  History history_;
};

Request set(const Key& key, std::string_view value) { return {StoreOperation::kSet, 0, {key}, {to_bytes(value)}}; }
Request get(const Key& key) { return {StoreOperation::kGet, 0, {key}}; }
Request add(const Key& key, int64_t number) { return {StoreOperation::kAdd, 0, {key}, {}, number}; }
Request push(const Key& key, std::string_view value) {
  return {StoreOperation::kQueuePush, 0, {key}, {to_bytes(value)}};
}
Request pop(const Key& key) { return {StoreOperation::kQueuePop, 0, {key}}; }
Request barrier(const Key& key, int64_t count) { return {StoreOperation::kBarrier, 0, {key}, {}, count}; }
Reply saw(std::string_view value) { return {.values = {to_bytes(value)}}; }
Reply number(int64_t number) { return {.number = number}; }

TEST(LinearCheck, AcceptsOneClientAfterAnother) {
  HandWrittenHistory history;
  history.then(1, 0, 1, set("k", "a")).then(2, 2, 3, get("k"), saw("a")).then(1, 4, 5, set("k", "b"));
  EXPECT_OK(history.then(2, 6, 7, get("k"), saw("b")).verdict());
  EXPECT_OK(HandWrittenHistory().verdict());
}

TEST(LinearCheck, AcceptsAnyOrderOfOverlappingCalls) {
  HandWrittenHistory history;
  history.then(1, 0, 10, set("k", "a")).then(2, 0, 10, set("k", "b")).then(3, 1, 2, get("k"), saw("b"));
  EXPECT_OK(history.then(3, 3, 4, get("k"), saw("a")).verdict());
  expect_error(history.then(4, 5, 6, get("k"), saw("b")).verdict(), ErrorCode::kMismatch, "client 4 get k");
}

TEST(LinearCheck, RejectsAStaleRead) {
  HandWrittenHistory history;
  history.then(1, 0, 1, set("k", "a")).then(1, 2, 3, set("k", "b")).then(2, 4, 5, get("k"), saw("a"));
  expect_error(history.verdict(), ErrorCode::kMismatch, "\"a\"");
}

TEST(LinearCheck, RejectsAReadThatGoesBackInTime) {
  HandWrittenHistory history;
  history.then(1, 0, 1, set("k", "a")).then(1, 2, 20, set("k", "b"));
  history.then(2, 4, 5, get("k"), saw("b")).then(3, 6, 7, get("k"), saw("a"));
  expect_error(history.verdict(), ErrorCode::kMismatch);
}

TEST(LinearCheck, RejectsAReadOfAnUnwrittenValue) {
  expect_error(HandWrittenHistory().then(1, 0, 1, set("k", "a")).then(2, 0, 1, get("k"), saw("b")).verdict(),
               ErrorCode::kMismatch);
  expect_error(HandWrittenHistory().then(1, 2, 3, set("k", "a")).then(2, 0, 1, get("k"), saw("a")).verdict(),
               ErrorCode::kMismatch);
}

TEST(LinearCheck, RejectsALostUpdate) {
  HandWrittenHistory history;
  history.then(1, 0, 10, add("n", 1), number(1)).then(2, 0, 10, add("n", 1), number(1));
  expect_error(history.verdict(), ErrorCode::kMismatch);
}

TEST(LinearCheck, RejectsAnAddThatWasDoneTwice) {
  HandWrittenHistory history;
  history.then(1, 0, 1, add("n", 1), number(1)).then(1, 2, 3, add("n", 1), number(3));
  expect_error(history.verdict(), ErrorCode::kMismatch);
}

TEST(LinearCheck, AcceptsALostCallOnceOrNever) {
  HandWrittenHistory lost_add;
  lost_add.then(1, 0, 1, add("n", 1), number(1)).lost(2, 2, add("n", 10));
  EXPECT_OK(HandWrittenHistory(lost_add).then(1, 3, 4, add("n", 1), number(2)).verdict());
  EXPECT_OK(HandWrittenHistory(lost_add).then(1, 3, 4, add("n", 1), number(12)).verdict());
  EXPECT_OK(HandWrittenHistory(lost_add)
                .then(1, 3, 4, add("n", 1), number(2))
                .then(1, 90, 91, get("n"), saw("12"))
                .verdict());
  expect_error(HandWrittenHistory(lost_add).then(1, 3, 4, add("n", 1), number(22)).verdict(), ErrorCode::kMismatch);
  expect_error(HandWrittenHistory(lost_add)
                   .then(1, 3, 4, add("n", 1), number(12))
                   .then(1, 5, 6, add("n", 1), number(3))
                   .verdict(),
               ErrorCode::kMismatch);
}

TEST(LinearCheck, RejectsAnEffectBeforeItsLostCall) {
  HandWrittenHistory history;
  history.then(1, 0, 1, add("n", 1), number(11)).lost(2, 2, add("n", 10));
  expect_error(history.verdict(), ErrorCode::kMismatch);
}

TEST(LinearCheck, ChecksCompareSetAndDelete) {
  const Request swap{StoreOperation::kCompareSet, 0, {"k"}, {to_bytes(""), to_bytes("mine")}};
  const Request remove{StoreOperation::kDelete, 0, {"k"}};
  EXPECT_OK(HandWrittenHistory().then(1, 0, 9, swap, saw("mine")).then(2, 0, 9, remove, number(1)).verdict());
  EXPECT_OK(HandWrittenHistory().then(1, 0, 9, swap, saw("mine")).then(2, 0, 9, remove, number(0)).verdict());
  expect_error(HandWrittenHistory().then(1, 0, 1, swap, saw("mine")).then(2, 2, 3, remove, number(0)).verdict(),
               ErrorCode::kMismatch);
  Request other = swap;
  other.values[1] = to_bytes("other");
  EXPECT_OK(HandWrittenHistory().then(1, 0, 9, swap, saw("mine")).then(2, 0, 9, other, saw("mine")).verdict());
  expect_error(HandWrittenHistory().then(1, 0, 9, swap, saw("mine")).then(2, 0, 9, other, saw("other")).verdict(),
               ErrorCode::kMismatch);
}

TEST(LinearCheck, RejectsAMultiGetThatSeesHalfAMultiSet) {
  const auto both = [](std::string_view value) {
    return Request{StoreOperation::kMultiSet, 0, {"a", "b"}, {to_bytes(value), to_bytes(value)}};
  };
  const Request read{StoreOperation::kMultiGet, 0, {"a", "b"}};
  const auto values = [](std::string_view a, std::string_view b) {
    return Reply{.values = {to_bytes(a), to_bytes(b)}};
  };
  HandWrittenHistory history;
  history.then(1, 0, 1, both("1")).then(1, 2, 9, both("2"));
  EXPECT_OK(HandWrittenHistory(history)
                .then(2, 3, 4, read, values("1", "1"))
                .then(2, 5, 6, read, values("2", "2"))
                .verdict());
  expect_error(HandWrittenHistory(history).then(2, 3, 4, read, values("1", "2")).verdict(), ErrorCode::kMismatch);
}

TEST(LinearCheck, CountsTheKeysOfAllClients) {
  const Request count{StoreOperation::kNumKeys};
  HandWrittenHistory history;
  history.then(1, 0, 1, set("a", "")).then(1, 2, 9, set("b", ""));
  EXPECT_OK(HandWrittenHistory(history).then(2, 3, 4, count, number(1)).then(2, 5, 6, count, number(2)).verdict());
  expect_error(HandWrittenHistory(history).then(2, 3, 4, count, number(2)).then(2, 5, 6, count, number(1)).verdict(),
               ErrorCode::kMismatch);
}

TEST(LinearCheck, RejectsAnElementThatIsTakenTwice) {
  HandWrittenHistory history;
  history.then(1, 0, 1, push("q", "x")).then(2, 0, 9, pop("q"), saw("x")).then(3, 0, 9, pop("q"), saw("x"));
  expect_error(history.verdict(), ErrorCode::kMismatch);
}

TEST(LinearCheck, RejectsAPopOutOfOrder) {
  HandWrittenHistory history;
  history.then(1, 0, 1, push("q", "x")).then(1, 2, 3, push("q", "y"));
  EXPECT_OK(HandWrittenHistory(history).then(2, 4, 5, pop("q"), saw("x")).then(3, 6, 7, pop("q"), saw("y")).verdict());
  EXPECT_OK(HandWrittenHistory(history).then(2, 4, 9, pop("q"), saw("y")).then(3, 5, 8, pop("q"), saw("x")).verdict());
  expect_error(
      HandWrittenHistory(history).then(2, 4, 5, pop("q"), saw("y")).then(3, 6, 7, pop("q"), saw("x")).verdict(),
      ErrorCode::kMismatch);
}

TEST(LinearCheck, AcceptsThatALostPopTookAnItem) {
  HandWrittenHistory history;
  history.then(1, 0, 1, push("q", "x")).then(1, 2, 3, push("q", "y")).lost(2, 4, pop("q"));
  EXPECT_OK(HandWrittenHistory(history).then(3, 6, 7, pop("q"), saw("y")).verdict());
  EXPECT_OK(HandWrittenHistory(history).then(3, 6, 7, pop("q"), saw("x")).verdict());
}

TEST(LinearCheck, RejectsABarrierThatIsNotFull) {
  EXPECT_OK(HandWrittenHistory().then(1, 0, 5, barrier("b", 2)).then(2, 4, 6, barrier("b", 2)).verdict());
  expect_error(HandWrittenHistory().then(1, 0, 5, barrier("b", 2)).verdict(), ErrorCode::kMismatch, "lacked 1");
  expect_error(HandWrittenHistory().then(1, 0, 5, barrier("b", 2)).then(2, 6, 7, barrier("b", 2)).verdict(),
               ErrorCode::kMismatch);
  HandWrittenHistory rounds;
  rounds.then(1, 0, 5, barrier("b", 2)).then(2, 4, 6, barrier("b", 2)).then(1, 6, 9, barrier("b", 2));
  expect_error(HandWrittenHistory(rounds).verdict(), ErrorCode::kMismatch);
  EXPECT_OK(HandWrittenHistory(rounds).lost(3, 1, barrier("b", 2)).verdict());
  EXPECT_OK(HandWrittenHistory(rounds).then(2, 7, 8, barrier("b", 2)).verdict());
}

TEST(LinearCheck, ReportsThatItGaveUp) {
  History history;
  for (int i = 0; i < 12; ++i) {
    const Request append{StoreOperation::kAppend, 0, {"k"}, {to_bytes(std::to_string(i))}};
    history.push_back({i, append, {0}, {100}, Reply{}});
  }
  history.push_back({99, get("k"), {101}, {102}, saw("never written")});
  expect_error(check_history(history, 1000), ErrorCode::kResourceExhausted);
}

// A history of random clients. Their replies come from the model itself, so a correct order exists. A test may then
// change one answer.
struct Generated {
  explicit Generated(uint64_t seed, int calls) : random(seed) {
    StoreModel model;
    int64_t now = 0;
    for (int i = 0; i < calls; ++i) {
      Call call{static_cast<int>(random.below(6)), draw(i), {now - static_cast<int64_t>(random.below(25))}};
      call.reply = model.apply(call.request);
      if (!call.reply) continue;
      call.returned = {++now + static_cast<int64_t>(random.below(25))};
      now += 5;
      if (random.chance(0.02)) call.reply.reset();
      history.push_back(std::move(call));
    }
  }
  Request draw(int serial) {
    const Key key = "k" + std::to_string(random.below(3));
    const std::string value = std::to_string(serial);
    switch (random.below(6)) {
      case 0:
        return set(key, value);
      case 1:
        return add("n", 1);
      case 2:
        return push("q", value);
      case 3:
        return pop("q");
      case 4:
        return {StoreOperation::kMultiGet, 0, {"k0", "k1"}};
      default:
        return get(key);
    }
  }
  Random random;
  History history;
};

TEST(LinearCheck, AcceptsTheModelsOwnAnswers) {
  for (uint64_t seed = 0; seed < 20; ++seed) EXPECT_OK(check_history(Generated(seed, 500).history));
}

TEST(LinearCheck, RejectsOneWrongAnswerAmongMany) {
  int rejected = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Generated generated(seed, 500);
    for (Call& call : generated.history) {
      const bool reads =
          call.request.operation == StoreOperation::kGet || call.request.operation == StoreOperation::kQueuePop;
      if (!reads || !call.reply || call.invoked.ns < 1000) continue;
      call.reply->values = {to_bytes("0")};  // a value that was overwritten long ago or never written
      break;
    }
    rejected += !check_history(generated.history).has_value();
  }
  EXPECT_EQ(rejected, 20);
}

}  // namespace
}  // namespace muster
