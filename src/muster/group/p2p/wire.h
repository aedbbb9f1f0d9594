#pragma once

#include <array>

#include "muster/base/bytes.h"
#include "muster/base/dtype.h"

namespace muster {

/// The messages between the ends of a message channel; wire.cpp begins with their grammar. Append only.
enum class MessageKind : uint8_t {
  kEager = 1,
  kRequestToSend = 2,
  kData = 3,
  kClearToSend = 4,
  kReject = 5,
};

inline constexpr size_t kMessageHeaderBytes = 32;
/// The longest message that is sent eagerly. Also the most that an untrusted length makes a receiver allocate.
inline constexpr size_t kEagerBytes = size_t{32} << 10;
/// Bytes of eager messages from one sender, each with its header, that a receiver may have to keep.
inline constexpr size_t kEagerWindow = size_t{1} << 20;

struct MessageHeader {
  MessageKind kind = MessageKind::kEager;
  uint32_t tag = 0;
  uint64_t id = 0;
  uint64_t bytes = 0;
  uint64_t credit = 0;  ///< bytes of the window, given back
  Dtype dtype = Dtype::kUint8;
};

std::array<uint8_t, kMessageHeaderBytes> encode(const MessageHeader& header);
/// kProtocol for anything that is not a header. Ignores bytes after the first 32.
Result<MessageHeader> parse_message_header(ByteView bytes);

}  // namespace muster
