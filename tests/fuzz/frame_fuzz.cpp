// Frames. For any split into pieces, the parser must return the same frames as a simple parser of the whole input. It
// must never hold back a complete frame or accept an oversized one.
#include <algorithm>

#include "muster/base/check.h"
#include "muster/io/frame.h"

namespace muster {
namespace {

constexpr uint32_t kMaxLength = 200;

void parse_in_pieces(ByteView stream, size_t piece) {
  FrameParser parser(kMaxLength);
  ByteView plain = stream;
  bool dead = false;
  for (ByteView rest = stream; !rest.empty() && !dead;) {
    const size_t count = std::min(piece, rest.size());
    parser.feed(rest.first(count));
    rest = rest.subspan(count);
    while (!dead) {
      const auto frame = parser.next();
      const auto header = plain.size() >= kFrameHeaderBytes ? decode_frame_header(plain, kMaxLength) : FrameHeader{};
      dead = !frame;
      if (dead) MUSTER_CHECK(!header, "the parser refused a good frame");
      if (dead || !*frame) break;
      MUSTER_CHECK(header && header->length == (*frame)->payload.size(), "the parser invented a frame");
      MUSTER_CHECK(std::equal((*frame)->payload.begin(), (*frame)->payload.end(), plain.begin() + kFrameHeaderBytes),
                   "the parser changed a payload");
      plain = plain.subspan(kFrameHeaderBytes + header->length);
    }
    MUSTER_CHECK(dead || parser.buffered() < kFrameHeaderBytes + kMaxLength, "the parser hoards");
  }
  const auto left =
      plain.size() >= kFrameHeaderBytes ? decode_frame_header(plain, kMaxLength) : FrameHeader{UINT32_MAX};
  MUSTER_CHECK(dead || (left && left->length > plain.size() - std::min(plain.size(), kFrameHeaderBytes)),
               "the parser held a whole frame back");
}

}  // namespace
}  // namespace muster

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  muster::parse_in_pieces({data + 1, size - 1}, data[0] % 64 + 1);
  return 0;
}
