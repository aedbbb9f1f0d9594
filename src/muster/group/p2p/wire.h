#pragma once

#include <array>

#include "muster/base/bytes.h"
#include "muster/base/dtype.h"

namespace muster {

/// What the two ends of a message channel tell each other; the grammar heads messenger_wire.cpp. Append only.
enum class MessageKind : uint8_t {
  kEager = 1,
  kOffer = 2,
  kData = 3,
  kAccept = 4,
  kRefuse = 5,
};

inline constexpr size_t kMessageHeaderBytes = 32;
/// The longest message that goes without being asked for. Also the most that an untrusted length makes a receiver
/// allocate.
inline constexpr size_t kEagerBytes = size_t{32} << 10;
/// Bytes of eager messages, each with its header, that may be under way or unexpected at one receiver from one sender.
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
/// kProtocol for anything that is not a header. Bytes beyond the 32 are not looked at.
Result<MessageHeader> parse_message_header(ByteView bytes);

}  // namespace muster
