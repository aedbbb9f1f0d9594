#include "muster/io/frame.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "muster/base/random.h"

namespace muster {
namespace {

using testing::HasSubstr;

TEST(FrameHeader, HasTheBytesOfItsGrammar) {
  const auto bytes = encode(FrameHeader{0x01020304, 5, 6});
  EXPECT_THAT(bytes, testing::ElementsAre(4, 3, 2, 1, 5, 6, 0, 0));
  const auto header = decode_frame_header(bytes, UINT32_MAX);
  ASSERT_TRUE(header);
  EXPECT_EQ(header->length, 0x01020304u);
  EXPECT_EQ(header->kind, 5);
  EXPECT_EQ(header->flags, 6);
}

TEST(FrameHeader, RefusesOversizedTruncatedAndReservedHeaders) {
  const auto bytes = encode(FrameHeader{101, 7, 0});
  const auto oversized = decode_frame_header(bytes, 100);
  EXPECT_EQ(oversized.error().code, ErrorCode::kProtocol);
  EXPECT_THAT(oversized.error().message, HasSubstr("kind 7 announces 101 bytes where at most 100"));
  EXPECT_TRUE(decode_frame_header(bytes, 101));
  EXPECT_EQ(decode_frame_header(ByteView(bytes).first(7), 101).error().code, ErrorCode::kProtocol);
  auto reserved = bytes;
  reserved[7] = 1;
  EXPECT_EQ(decode_frame_header(reserved, 101).error().code, ErrorCode::kProtocol);
}

TEST(FrameParser, ParsesAStreamInPiecesOfAnySize) {
  Random random(3);
  for (int round = 0; round < 50; ++round) {
    Bytes stream;
    std::vector<Bytes> payloads;
    for (int i = 0; i < 30; ++i) {
      Bytes payload(random.below(300));
      for (auto& byte : payload) byte = static_cast<uint8_t>(random.next());
      const Bytes frame = encode_frame(static_cast<uint8_t>(i), payload, 9);
      stream.insert(stream.end(), frame.begin(), frame.end());
      payloads.push_back(std::move(payload));
    }
    FrameParser parser(300);
    size_t next = 0;
    for (ByteView rest = stream; !rest.empty();) {
      const size_t count = std::min<size_t>(rest.size(), random.below(200));
      parser.feed(rest.first(count));
      rest = rest.subspan(count);
      while (const auto frame = parser.next().value()) {
        EXPECT_EQ(frame->header.kind, next);
        EXPECT_EQ(frame->header.flags, 9);
        EXPECT_EQ(frame->payload, payloads.at(next++));
      }
    }
    EXPECT_EQ(next, payloads.size());
    EXPECT_EQ(parser.buffered(), 0u);
  }
}

TEST(FrameParser, WaitsForTheRestOfAFrame) {
  const Bytes frame = encode_frame(1, as_bytes("payload"));
  FrameParser parser(100);
  for (size_t i = 0; i + 1 < frame.size(); ++i) {
    parser.feed(ByteView(frame).subspan(i, 1));
    ASSERT_FALSE(parser.next().value()) << i;
    EXPECT_EQ(parser.buffered(), i + 1);
  }
  parser.feed(ByteView(frame).last(1));
  EXPECT_EQ(to_string(parser.next().value()->payload), "payload");
}

TEST(FrameParser, StaysFailedAfterAnOversizedFrame) {
  FrameParser parser(10);
  parser.feed(encode_frame(1, as_bytes("fits")));
  parser.feed(encode(FrameHeader{11, 2, 0}));
  EXPECT_TRUE(parser.next().value());
  EXPECT_EQ(parser.next().error().code, ErrorCode::kProtocol);
  parser.feed(encode_frame(1, as_bytes("fits")));
  EXPECT_EQ(parser.next().error().code, ErrorCode::kProtocol);
}

}  // namespace
}  // namespace muster
