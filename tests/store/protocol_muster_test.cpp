#include <gtest/gtest.h>

#include "muster/base/random.h"
#include "muster/store/protocol/messages.h"
#include "muster/store/protocol/protocol.h"

namespace muster {
namespace {

Frame parse(const Bytes& bytes) {
  FrameParser parser(kMaxMessageBytes);
  parser.feed(bytes);
  return **parser.next();
}

Result<Request> round_trip(const Request& request) {
  const Frame frame = parse(*encode_request(request));
  return decode_request(frame.header, frame.payload);
}

Result<Reply> round_trip(const Reply& reply) {
  const Frame frame = parse(encode_reply(reply));
  return decode_reply(frame.header, frame.payload);
}

TEST(MusterProtocol, CarriesEveryFieldOfARequest) {
  for (uint8_t operation = 1; operation <= static_cast<uint8_t>(StoreOperation::kCancel); ++operation) {
    const Request request{static_cast<StoreOperation>(operation),
                          1ULL << 63,
                          {"", Key("a\0b", 3)},
                          {{}, {0, 255}},
                          -5,
                          operation % 2 == 0};
    const auto back = round_trip(request);
    ASSERT_TRUE(back.has_value()) << back.error().to_string();
    EXPECT_EQ(back->operation, request.operation);
    EXPECT_EQ(back->id, request.id);
    EXPECT_EQ(back->keys, request.keys);
    EXPECT_EQ(back->values, request.values);
    EXPECT_EQ(back->number, request.number);
    EXPECT_EQ(back->immediate, request.immediate);
  }
}

TEST(MusterProtocol, CarriesValuesAndErrorsInReplies) {
  const auto values = round_trip(Reply{0, 9, {}, {{1}, {}}, {"k"}, -1});
  ASSERT_TRUE(values && values->status);
  EXPECT_EQ(values->id, 9U);
  EXPECT_EQ(values->values, (std::vector<Bytes>{{1}, {}}));
  EXPECT_EQ(values->keys, std::vector<Key>{"k"});
  EXPECT_EQ(values->number, -1);
  const auto error = round_trip(Reply{0, 9, tl::unexpected(Error{ErrorCode::kInternal, "what", 3, "when"})});
  ASSERT_TRUE(error && !error->status);
  EXPECT_EQ(error->status.error().code, ErrorCode::kInternal);
  EXPECT_EQ(error->status.error().to_string(), "internal error: what (during when)");
  EXPECT_EQ(error->status.error().rank, 3);
}

TEST(MusterProtocol, ReadsRequestsInPiecesOfAnySize) {
  Bytes stream;
  for (RequestId id = 0; id < 50; ++id) {
    const Bytes frame = *encode_request({StoreOperation::kSet, id, {"key"}, {Bytes(id * 13, 7)}});
    stream.insert(stream.end(), frame.begin(), frame.end());
  }
  Random random(20240611);
  for (int round = 0; round < 20; ++round) {
    const auto protocol = muster_protocol();
    RequestId expected = 0;
    for (size_t at = 0; at < stream.size();) {
      const size_t count = std::min<size_t>(random.between(1, 700), stream.size() - at);
      protocol->feed(ByteView(stream).subspan(at, count));
      at += count;
      Bytes out;
      while (auto request = *protocol->next(out)) EXPECT_EQ(request->id, expected++);
    }
    EXPECT_EQ(expected, 50U);
  }
}

TEST(MusterProtocol, RefusesMalformedMessages) {
  const Bytes good = *encode_request({StoreOperation::kSet, 1, {"key"}, {{1, 2, 3}}});
  const Frame frame = parse(good);
  const auto broken = [&](auto change) {
    Frame copy = frame;
    change(copy);
    const auto result = decode_request(copy.header, copy.payload);
    return !result && result.error().code == ErrorCode::kProtocol;
  };
  for (size_t size = 0; size < frame.payload.size(); ++size) {
    EXPECT_TRUE(broken([&](Frame& f) { f.payload.resize(size); })) << size;
  }
  EXPECT_TRUE(broken([](Frame& f) { f.payload.push_back(0); }));
  EXPECT_TRUE(broken([](Frame& f) { f.header.kind = 0; }));
  EXPECT_TRUE(broken([](Frame& f) { f.header.kind = 100; }));
  EXPECT_TRUE(broken([](Frame& f) { f.header.flags = 8; }));
  EXPECT_TRUE(broken([](Frame& f) { std::fill_n(f.payload.begin() + 16, 4, 0xff); })) << "four billion keys";
  const auto protocol = muster_protocol();
  protocol->feed(encode(FrameHeader{kMaxMessageBytes + 1, 1, 0}));
  Bytes out;
  EXPECT_EQ(protocol->next(out).error().code, ErrorCode::kProtocol);
}

}  // namespace
}  // namespace muster
