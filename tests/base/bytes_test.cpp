#include "muster/base/bytes.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(Bytes, HexSurvivesARoundTrip) {
  const Bytes bytes{0x00, 0x7f, 0xff, 0x10};
  EXPECT_EQ(to_hex(bytes), "007fff10");
  EXPECT_EQ(from_hex("007fFF10"), bytes);
  EXPECT_EQ(from_hex("007").error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(from_hex("0g").error().code, ErrorCode::kInvalidArgument);
}

TEST(Bytes, SizesAreWrittenInPowersOf1024) {
  EXPECT_EQ(format_bytes(8), "8 B");
  EXPECT_EQ(format_bytes(65536), "64 KiB");
  EXPECT_EQ(format_bytes(3 << 19), "1.5 MiB");
}

TEST(Bytes, ReaderReturnsWrittenValues) {
  const Bytes message = Writer().put<uint8_t>(7).put<int32_t>(-5).put_string("key").put_bytes({}).take();
  Reader in(message);
  EXPECT_EQ(in.get<uint8_t>(), 7);
  EXPECT_EQ(in.get<int32_t>(), -5);
  EXPECT_EQ(in.get_string(), "key");
  EXPECT_EQ(in.get_bytes()->size(), 0u);
  EXPECT_TRUE(in.finish());
}

TEST(Bytes, RefusesEveryTruncationOfAMessage) {
  const Bytes message = Writer().put<uint64_t>(1).put_string("abcdef").put<uint16_t>(2).take();
  for (size_t length = 0; length < message.size(); ++length) {
    const Bytes cut(message.begin(), message.begin() + static_cast<std::ptrdiff_t>(length));
    Reader in(cut);
    const bool whole = in.get<uint64_t>() && in.get_string() && in.get<uint16_t>();
    EXPECT_FALSE(whole) << length;
  }
}

TEST(Bytes, RefusesALengthBeyondTheMessageWithoutAllocating) {
  const Bytes message = Writer().put<uint32_t>(0xffffffff).put<uint8_t>(1).take();
  Reader in(message);
  EXPECT_EQ(in.get_string().error().code, ErrorCode::kProtocol);
}

TEST(Bytes, LeftoverBytesAreAnError) {
  const Bytes message = Writer().put<uint16_t>(1).take();
  Reader in(message);
  ASSERT_TRUE(in.get<uint8_t>());
  EXPECT_EQ(in.finish().error().code, ErrorCode::kProtocol);
}

}  // namespace
}  // namespace muster
