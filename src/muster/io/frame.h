#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "muster/base/bytes.h"

namespace muster {

/// The unit of every muster protocol on a stream:
///
///   frame := length:u32 kind:u8 flags:u8 reserved:u16 payload[length]        (little-endian; header is 8 bytes)
///
/// `length` counts the payload only. Each protocol defines its frame kinds and its maximum length. A longer frame is
/// kProtocol and ends the connection before any memory is allocated for it.
struct FrameHeader {
  uint32_t length = 0;
  uint8_t kind = 0;
  uint8_t flags = 0;
};
inline constexpr size_t kFrameHeaderBytes = 8;

std::array<uint8_t, kFrameHeaderBytes> encode(const FrameHeader& header);
/// kProtocol when `length` is over `max_length` or the reserved bytes are not zero.
Result<FrameHeader> decode_frame_header(ByteView bytes, uint32_t max_length);

struct Frame {
  FrameHeader header;
  Bytes payload;
};
Bytes encode_frame(uint8_t kind, ByteView payload, uint8_t flags = 0);

/// Cuts a byte stream into frames. Holds at most one frame that is not complete.
class FrameParser {
 public:
  explicit FrameParser(uint32_t max_length) : max_length_(max_length) {}
  /// Adds the next bytes of the stream.
  void feed(ByteView bytes);
  /// The next whole frame, empty if there is none yet, or kProtocol (then the stream cannot be used any more).
  Result<std::optional<Frame>> next();
  /// Bytes that were fed and not yet taken out as frames.
  size_t buffered() const { return buffer_.size() - consumed_; }

 private:
  uint32_t max_length_;
  Bytes buffer_;
  size_t consumed_ = 0;
};

}  // namespace muster
