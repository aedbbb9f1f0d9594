#pragma once

#include <array>
#include <bit>

#include "muster/base/bytes.h"
#include "muster/base/dtype.h"

namespace muster {

/// The kinds of frames between the two ends of a message channel. The grammar is at the top of wire.cpp. The values are
/// part of the wire format: append new kinds, never change existing ones.
enum class MessageKind : uint8_t {
  kEager = 1,
  kRequestToSend = 2,
  kData = 3,
  kClearToSend = 4,
  kReject = 5,
};

inline constexpr size_t kMessageHeaderBytes = 32;
/// The longest message that is sent eagerly. It also bounds the memory that a receiver allocates for a length from the
/// wire.
inline constexpr size_t kEagerBytes = size_t{32} << 10;
/// The maximum bytes of eager messages from one sender, including headers, that a receiver may have to keep.
inline constexpr size_t kEagerWindow = size_t{1} << 20;

/// The bytes of a header on the wire, because every supported machine is little-endian.
struct MessageHeader {
  MessageKind kind = MessageKind::kEager;
  Dtype dtype = Dtype::kUint8;
  uint16_t zero = 0;
  uint32_t tag = 0;
  uint64_t id = 0;
  uint64_t bytes = 0;
  uint64_t credit = 0;  ///< bytes of the window that the receiver gives back
};
static_assert(sizeof(MessageHeader) == kMessageHeaderBytes);

inline std::array<uint8_t, kMessageHeaderBytes> encode(const MessageHeader& header) {
  return std::bit_cast<std::array<uint8_t, kMessageHeaderBytes>>(header);
}
/// Returns kProtocol if the bytes are not a valid header. Ignores bytes after the first 32.
Result<MessageHeader> parse_message_header(ByteView bytes);

}  // namespace muster
