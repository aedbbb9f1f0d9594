#include "muster/io/frame.h"

#include <fmt/format.h>

#include "muster/base/check.h"

namespace muster {

std::array<uint8_t, kFrameHeaderBytes> encode(const FrameHeader& header) {
  std::array<uint8_t, kFrameHeaderBytes> bytes{};
  std::memcpy(bytes.data(), &header.length, sizeof header.length);
  bytes[4] = header.kind;
  bytes[5] = header.flags;
  return bytes;
}

Result<FrameHeader> decode_frame_header(ByteView bytes, uint32_t max_length) {
  Reader reader(bytes);
  FrameHeader header;
  MUSTER_ASSIGN(header.length, reader.get<uint32_t>());
  MUSTER_ASSIGN(header.kind, reader.get<uint8_t>());
  MUSTER_ASSIGN(header.flags, reader.get<uint8_t>());
  MUSTER_ASSIGN(const auto reserved, reader.get<uint16_t>());
  if (reserved != 0) {
    return fail(ErrorCode::kProtocol, fmt::format("a frame's reserved bytes are {:#06x}, not zero", reserved));
  }
  if (header.length > max_length) {
    return fail(ErrorCode::kProtocol, fmt::format("a frame of kind {} announces {} bytes where at most {} are allowed",
                                                  header.kind, header.length, max_length));
  }
  return header;
}

Bytes encode_frame(uint8_t kind, ByteView payload, uint8_t flags) {
  MUSTER_CHECK(payload.size() <= UINT32_MAX, "a frame's payload must be under 4 GiB");
  const auto header = encode(FrameHeader{static_cast<uint32_t>(payload.size()), kind, flags});
  Bytes frame;
  frame.reserve(header.size() + payload.size());
  frame.insert(frame.end(), header.begin(), header.end());
  frame.insert(frame.end(), payload.begin(), payload.end());
  return frame;
}

void FrameParser::feed(ByteView bytes) {
  // Erases the consumed bytes before the buffer must grow, so that it holds little more than one frame.
  if (consumed_ > 0 && (consumed_ == buffer_.size() || buffer_.size() + bytes.size() > buffer_.capacity())) {
    buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<ptrdiff_t>(consumed_));
    consumed_ = 0;
  }
  buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
}

Result<std::optional<Frame>> FrameParser::next() {
  const ByteView rest = ByteView(buffer_).subspan(consumed_);
  if (rest.size() < kFrameHeaderBytes) return std::nullopt;
  MUSTER_ASSIGN(const FrameHeader header, decode_frame_header(rest, max_length_));
  if (rest.size() - kFrameHeaderBytes < header.length) return std::nullopt;
  const ByteView payload = rest.subspan(kFrameHeaderBytes, header.length);
  consumed_ += kFrameHeaderBytes + header.length;
  return Frame{header, Bytes(payload.begin(), payload.end())};
}

}  // namespace muster
