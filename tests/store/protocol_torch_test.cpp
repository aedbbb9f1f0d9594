#include <gtest/gtest.h>

#include "muster/base/random.h"
#include "muster/store/protocol/protocol.h"

namespace muster {
namespace {

// The bytes that a client of torch 2.13 sends, recorded from a real client: connect, then each operation.
constexpr std::string_view kConnect = "00cef7853c0d4a1d0000";
constexpr std::string_view kSet = "0102000000000000002f6b010000000000000076";
constexpr std::string_view kWait = "06010000000000000002000000000000002f6b";
constexpr std::string_view kGet = "0302000000000000002f6b";
constexpr std::string_view kCompareSet = "0202000000000000002f63010000000000000078010000000000000065";
constexpr std::string_view kAdd = "0402000000000000002f6e0500000000000000";
constexpr std::string_view kCheck = "05020000000000000002000000000000002f6b02000000000000002f6e";
constexpr std::string_view kMultiSet =
    "0b020000000000000002000000000000002f6101000000000000003102000000000000002f62010000000000000032";
constexpr std::string_view kMultiGet = "0a020000000000000002000000000000002f6102000000000000002f62";
constexpr std::string_view kQueuePop = "0f02000000000000002f71";
constexpr std::string_view kBarrier = "1204000000000000002f6261720100000000000000";
constexpr std::string_view kCancel = "0c";

class TorchProtocol : public testing::Test {
 protected:
  TorchProtocol() { feed(kConnect); }

  void feed(std::string_view hex) { protocol_->feed(*from_hex(hex)); }
  std::optional<Request> next() {
    auto request = protocol_->next(out_);
    EXPECT_TRUE(request.has_value()) << request.error().to_string();
    return request ? *request : std::nullopt;
  }
  Request send(std::string_view hex) {
    feed(hex);
    auto request = next();
    EXPECT_TRUE(request.has_value());
    return request.value_or(Request{});
  }
  std::string take_output() { return to_hex(std::exchange(out_, {})); }
  std::string reply(const Reply& reply) {
    EXPECT_TRUE(protocol_->encode(reply, out_).has_value());
    return take_output();
  }
  std::string refusal() {
    const auto request = protocol_->next(out_);
    return request ? "" : request.error().to_string();
  }

  std::unique_ptr<Protocol> protocol_ = torch_protocol();
  Bytes out_;
};

TEST_F(TorchProtocol, AnswersValidateAndPingItself) {
  EXPECT_FALSE(next().has_value());
  EXPECT_EQ(take_output(), "4a1d0000");
}

TEST_F(TorchProtocol, ReadsRequestsAndWritesReplies) {
  next();
  take_output();
  const Request set = send(kSet);
  EXPECT_EQ(set.operation, StoreOperation::kSet);
  EXPECT_EQ(set.keys, std::vector<Key>{"/k"});
  EXPECT_EQ(set.values, std::vector<Bytes>{{'v'}});
  EXPECT_EQ(reply({0, set.id}), "");

  const Request wait = send(kWait);
  EXPECT_EQ(wait.operation, StoreOperation::kWait);
  EXPECT_EQ(reply({0, wait.id}), "00");
  const Request get = send(kGet);
  EXPECT_TRUE(get.operation == StoreOperation::kGet && get.immediate);
  EXPECT_EQ(reply({0, get.id, {}, {{'v'}}}), "010000000000000076");

  const Request compare = send(kCompareSet);
  EXPECT_EQ(compare.values, (std::vector<Bytes>{{'x'}, {'e'}}));
  EXPECT_EQ(reply({0, compare.id, {}, {{}}}), "0000000000000000");
  const Request add = send(kAdd);
  EXPECT_EQ(add.number, 5);
  EXPECT_EQ(reply({0, add.id, {}, {}, {}, -2}), "feffffffffffffff");
  EXPECT_EQ(reply({0, send(kCheck).id, {}, {}, {}, 1}), "00");
  EXPECT_EQ(reply({0, send(kCheck).id, {}, {}, {}, 0}), "01");

  EXPECT_EQ(send(kMultiSet).values, (std::vector<Bytes>{{'1'}, {'2'}}));
  const Request many = send(kMultiGet);
  EXPECT_EQ(many.keys, (std::vector<Key>{"/a", "/b"}));
  EXPECT_EQ(reply({0, many.id, {}, {{'1'}, {}}}), "0100000000000000310000000000000000");
  EXPECT_EQ(reply({0, send(kQueuePop).id, {}, {{'x'}}, {}, 2}), "0200000000000000010000000000000078");
  EXPECT_EQ(reply({0, send(kQueuePop).id}), "0000000000000000");
  EXPECT_EQ(send(kBarrier).number, 1);
  EXPECT_EQ(reply({0, send("11").id, {}, {}, {"/a"}}), "010000000000000002000000000000002f61");
  EXPECT_EQ(send("07").operation, StoreOperation::kNumKeys);
}

TEST_F(TorchProtocol, ConfirmsACancellationAndDropsALateRelease) {
  next();
  take_output();
  const Request wait = send(kWait);
  const Request cancel = send(kCancel);
  EXPECT_EQ(cancel.operation, StoreOperation::kCancel);
  EXPECT_EQ(cancel.id, wait.id);
  EXPECT_EQ(take_output(), "01");
  EXPECT_EQ(reply({0, wait.id}), "") << "the release was already on its way";
  EXPECT_EQ(reply({0, wait.id, fail(ErrorCode::kAborted, "cancelled")}), "");
}

TEST_F(TorchProtocol, ConfirmsTheCancellationOfAReleasedWait) {
  next();
  take_output();
  EXPECT_EQ(reply({0, send(kWait).id}), "00");
  feed(kCancel);
  EXPECT_FALSE(next().has_value()) << "nothing is left to cancel";
  EXPECT_EQ(take_output(), "01");
}

TEST_F(TorchProtocol, CannotEncodeAnError) {
  next();
  const Request add = send(kAdd);
  EXPECT_FALSE(protocol_->encode({0, add.id, fail(ErrorCode::kInvalidArgument, "no number")}, out_).has_value());
}

TEST_F(TorchProtocol, ReadsRequestsInPiecesOfAnySize) {
  std::string hex(kConnect);
  for (const auto part : {kSet, kWait, kGet, kCompareSet, kAdd, kCheck, kMultiSet, kMultiGet, kQueuePop, kBarrier}) {
    hex += part;
  }
  const Bytes stream = *from_hex(hex);
  Random random(7);
  for (int round = 0; round < 50; ++round) {
    protocol_ = torch_protocol();
    int count = 0;
    for (size_t at = 0; at < stream.size();) {
      const size_t size = std::min<size_t>(random.between(1, 30), stream.size() - at);
      protocol_->feed(ByteView(stream).subspan(at, size));
      at += size;
      while (next()) ++count;
    }
    EXPECT_EQ(count, 10);
  }
}

TEST_F(TorchProtocol, RefusesOtherProtocols) {
  for (const std::string_view first : {"0001020304", "010100", "474554202f"}) {
    protocol_ = torch_protocol();
    feed(first);
    EXPECT_NE(refusal(), "") << first;
  }
}

TEST_F(TorchProtocol, RefusesUnknownOperationsAndLargeLengths) {
  for (const std::string_view wrong :
       {"13", "ff", "03ffffffffffffffff", "030100010000000000", "0102000000000000002f6bffffffffffffff7f",
        "06ffffffffffffffff", "0bffffff0000000000"}) {
    protocol_ = torch_protocol();
    feed(kConnect);
    next();
    feed(wrong);
    EXPECT_NE(refusal(), "") << wrong;
  }
}

TEST_F(TorchProtocol, ReadsALongListThatArrivesSlowly) {
  // A parser that starts again with every byte would take hours.
  constexpr uint64_t kKeys = 100'000;
  next();
  Writer wait;
  wait.put(uint8_t{6}).put(kKeys);
  for (uint64_t i = 0; i < kKeys; ++i) wait.put(uint64_t{1}).put(static_cast<uint8_t>(i));
  for (const uint8_t& byte : wait.bytes()) {
    protocol_->feed({&byte, 1});
    if (&byte != &wait.bytes().back()) {
      ASSERT_FALSE(next().has_value());
    }
  }
  const auto request = next();
  ASSERT_TRUE(request.has_value());
  EXPECT_EQ(request->keys.size(), kKeys);
  EXPECT_EQ(request->keys[257], std::string("\x01"));
}

TEST_F(TorchProtocol, HidesThePrefixFromClients) {
  protocol_ = torch_protocol("generation/7");
  feed(kConnect);
  next();
  take_output();
  EXPECT_EQ(send(kGet).keys, std::vector<Key>{"generation/7/k"});
  EXPECT_EQ(send(kMultiSet).keys, (std::vector<Key>{"generation/7/a", "generation/7/b"}));
  EXPECT_EQ(send("07").keys, std::vector<Key>{"generation/7"});
  const Request list = send("11");
  EXPECT_EQ(list.keys, std::vector<Key>{"generation/7"});
  EXPECT_EQ(reply({0, list.id, {}, {}, {"generation/7/a"}}), "010000000000000002000000000000002f61");
}

}  // namespace
}  // namespace muster
