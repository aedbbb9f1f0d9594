#include "muster/rpc/wire.h"

#include <gtest/gtest.h>

#include <cstring>

namespace muster::rpc {
namespace {

constexpr uint64_t kMaxBytes = uint64_t{1} << 30;

Message message_of(const std::vector<size_t>& parts) {
  Message message;
  message.head.assign(parts.front(), 7);
  for (size_t i = 1; i < parts.size(); ++i) message.segments.push_back(Buffer::copy_of(Bytes(parts[i], uint8_t(i))));
  return message;
}

/// The messages of the batch after its header.
Bytes body_of(BatchWriter& writer) {
  const Bytes batch = writer.take({});
  EXPECT_EQ(*parse_batch_header(batch), batch.size() - kBatchHeaderBytes);
  return {batch.begin() + kBatchHeaderBytes, batch.end()};
}

class WireRoundTrip : public testing::TestWithParam<std::vector<size_t>> {};

TEST_P(WireRoundTrip, KeepsEachPart) {
  const Message message = message_of(GetParam());
  BatchWriter writer;
  std::vector<Buffer> long_parts;
  ASSERT_TRUE(
      writer.add({.kind = Kind::kRequest, .flags = kOneWay, .id = 9, .timeout_us = 5}, "f", message, long_parts));
  const Bytes body = body_of(writer);
  ByteView rest = body;
  auto parsed = parse_message(rest, kMaxBytes);
  ASSERT_TRUE(parsed) << parsed.error().to_string();
  EXPECT_TRUE(rest.empty());
  EXPECT_EQ(parsed->header.id, 9);
  EXPECT_EQ(parsed->header.timeout_us, 5);
  EXPECT_EQ(parsed->header.flags, kOneWay);
  EXPECT_EQ(parsed->name, "f");
  ASSERT_EQ(parsed->long_parts.size(), long_parts.size());
  for (size_t i = 0; i < long_parts.size(); ++i) {
    const auto [index, bytes] = parsed->long_parts[i];
    ASSERT_EQ(bytes, long_parts[i].size());
    if (index == ParsedMessage::kHeadPart) {
      parsed->message.head.assign(long_parts[i].data(), long_parts[i].data() + bytes);
    } else {
      parsed->message.segments.at(index) = long_parts[i];
    }
  }
  EXPECT_EQ(parsed->message.head, message.head);
  ASSERT_EQ(parsed->message.segments.size(), message.segments.size());
  for (size_t i = 0; i < message.segments.size(); ++i) {
    const ByteView expected = message.segments[i].view(), got = parsed->message.segments[i].view();
    EXPECT_TRUE(std::ranges::equal(expected, got)) << "segment " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, WireRoundTrip,
                         testing::Values(std::vector<size_t>{0}, std::vector<size_t>{5, 0, 1, 8},
                                         std::vector<size_t>{100, kMaxInlineBytes, kMaxInlineBytes + 1, 3},
                                         std::vector<size_t>{kMaxInlineBytes + 1, 1 << 20, 2},
                                         std::vector<size_t>{1, 16000, 16000, 16000, 16000, 16000, 16000}));

TEST(Wire, JoinsSmallMessagesInOneBatch) {
  BatchWriter writer;
  std::vector<Buffer> long_parts;
  int added = 0;
  while (writer.add({.kind = Kind::kReply, .id = uint64_t(added + 1)}, {}, message_of({1000}), long_parts)) ++added;
  EXPECT_GT(added, 900);
  const Bytes body = body_of(writer);
  EXPECT_LE(body.size(), kMaxBatchBytes);
  ByteView rest = body;
  for (int i = 1; i <= added; ++i) EXPECT_EQ(parse_message(rest, kMaxBytes)->header.id, i);
  EXPECT_TRUE(rest.empty());
}

TEST(Wire, RefusesMessagesThatAreCutOff) {
  BatchWriter writer;
  std::vector<Buffer> long_parts;
  ASSERT_TRUE(writer.add({.kind = Kind::kRequest, .id = 1}, "name", message_of({10, 20, 30}), long_parts));
  const Bytes body = body_of(writer);
  for (size_t length = 0; length < body.size(); ++length) {
    ByteView rest = ByteView(body).first(length);
    const auto parsed = parse_message(rest, kMaxBytes);
    ASSERT_FALSE(parsed) << length;
    EXPECT_EQ(parsed.error().code, ErrorCode::kProtocol);
  }
}

/// A message with one field of its header replaced.
Result<ParsedMessage> parse_changed(const std::function<void(MessageHeader&)>& change, uint64_t max_bytes = kMaxBytes) {
  MessageHeader header{.kind = Kind::kRequest, .name_bytes = 1, .segments = 1, .id = 1, .head_bytes = 2};
  change(header);
  Bytes body(sizeof header + 1 + 8 + 2 + 4, 0);
  std::memcpy(body.data(), &header, sizeof header);
  body[sizeof header + 1] = 4;
  ByteView rest = body;
  return parse_message(rest, max_bytes);
}

TEST(Wire, RefusesInvalidHeaders) {
  ASSERT_TRUE(parse_changed([](MessageHeader&) {}));
  EXPECT_FALSE(parse_changed([](MessageHeader& header) { header.kind = static_cast<Kind>(0); }));
  EXPECT_FALSE(parse_changed([](MessageHeader& header) { header.kind = static_cast<Kind>(7); }));
  EXPECT_FALSE(parse_changed([](MessageHeader& header) { header.flags = 128; }));
  EXPECT_FALSE(parse_changed([](MessageHeader& header) { header.name_bytes = 2000; }));
  EXPECT_FALSE(parse_changed([](MessageHeader& header) { header.segments = UINT32_MAX; }));
  EXPECT_FALSE(parse_changed([](MessageHeader& header) { header.head_bytes = UINT64_MAX; }));
  EXPECT_FALSE(parse_changed([](MessageHeader& header) { header.head_bytes = kMaxBytes; }));
  EXPECT_FALSE(parse_changed([](MessageHeader&) {}, 5)) << "2 + 4 bytes are over a cap of 5";
}

TEST(Wire, RefusesInvalidBatchHeaders) {
  const auto header = [](uint32_t bytes, uint32_t zero) {
    Bytes out(kBatchHeaderBytes);
    std::memcpy(out.data(), &bytes, 4);
    std::memcpy(out.data() + 4, &zero, 4);
    return parse_batch_header(out);
  };
  EXPECT_TRUE(header(kMessageHeaderBytes, 0));
  EXPECT_FALSE(header(kMessageHeaderBytes - 1, 0));
  EXPECT_FALSE(header(kMaxBatchBytes + 1, 0));
  EXPECT_FALSE(header(2'000'000'000, 0));
  EXPECT_FALSE(header(kMessageHeaderBytes, 1));
}

TEST(Wire, LongErrorsAreCutBetweenCharacters) {
  std::string text;
  while (text.size() < 20'000) text += "\u00e4x\u20ac";  // characters of two, one and three bytes
  for (const size_t shift : {0, 1, 2, 3, 4, 5}) {
    CallError error{{ErrorCode::kInternal, std::string(shift, '.') + text}, "T", text + std::string(shift, '.')};
    const auto parsed = parse_error(encode_error(error));
    ASSERT_TRUE(parsed);
    const std::string& message = parsed->error.message;
    EXPECT_TRUE(error.error.message.starts_with(message));
    EXPECT_GE(message.size(), 4000u);
    EXPECT_NE(static_cast<uint8_t>(error.error.message[message.size()]) & 0xc0, 0x80) << shift;
    EXPECT_TRUE(error.traceback.ends_with(parsed->traceback));
    EXPECT_GE(parsed->traceback.size(), 4000u);
    EXPECT_NE(static_cast<uint8_t>(parsed->traceback[0]) & 0xc0, 0x80) << shift;
  }
}

TEST(Wire, ErrorsKeepTypeAndTheEndOfATraceback) {
  const CallError error{
      {ErrorCode::kNotFound, "no such row", kNoRank, {}}, "KeyError", std::string(100'000, 'x') + "end"};
  const auto parsed = parse_error(encode_error(error));
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->error.code, ErrorCode::kNotFound);
  EXPECT_EQ(parsed->error.message, "no such row");
  EXPECT_EQ(parsed->type, "KeyError");
  EXPECT_TRUE(parsed->traceback.ends_with("end"));
  EXPECT_LT(parsed->traceback.size(), kMaxInlineBytes);
  EXPECT_FALSE(parse_error(Message{to_bytes("short"), {}}));
}

}  // namespace
}  // namespace muster::rpc
