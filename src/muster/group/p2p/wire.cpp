// Wire format of messages between two ranks. They use a link (transport/link.h) that the sender dialed, so there is one
// link for each direction.
//
//   header := kind:u8 dtype:u8 zero:u8[2] tag:u32 id:u64 bytes:u64 credit:u64      32 bytes, little-endian
//
//   from the sender to the receiver
//   kind 1 eager            := dtype, tag, bytes, then bytes[bytes]  a whole message, at most 32 KiB
//   kind 2 request to send  := dtype, tag, id, bytes                 announces a message; ids count up from 1
//   kind 3 data             := id, bytes, then bytes[bytes]          next bytes of a cleared message; none if empty
//   from the receiver to the sender
//   kind 4 clear to send    := id, credit
//   kind 5 reject           := dtype, id, bytes, credit              mismatch; dtype and bytes are the receive's
//
// Fields that a kind does not name are zero. An eager message uses bytes + 32 of the sender's window of 1 MiB. The
// receiver's answers give back the credit of the eager messages received since the last answer. Without enough credit,
// a sender announces the message with a request to send. Any deviation is a kProtocol error.
#include "muster/group/p2p/wire.h"

#include <fmt/format.h>

namespace muster {
namespace {

/// The fields that a kind uses.
struct Fields {
  bool dtype, tag, id, bytes, credit;
};

constexpr Fields kFields[] = {
    {},                                 // unused
    {true, true, false, true, false},   // eager
    {true, true, true, true, false},    // request to send
    {false, false, true, true, false},  // data
    {false, false, true, false, true},  // clear to send
    {true, false, true, true, true},    // reject
};

bool fits(const MessageHeader& header) {
  const Fields& fields = kFields[static_cast<size_t>(header.kind)];
  return (fields.dtype || header.dtype == Dtype{}) && (fields.tag || header.tag == 0) &&
         fields.id == (header.id != 0) && (fields.bytes || header.bytes == 0) && (fields.credit || header.credit == 0);
}

}  // namespace

Result<MessageHeader> parse_message_header(ByteView bytes) {
  MUSTER_ASSIGN(const ByteView raw, Reader(bytes).get_raw(kMessageHeaderBytes));
  MessageHeader header;
  std::memcpy(&header, raw.data(), sizeof(header));
  const auto kind = static_cast<unsigned>(header.kind), dtype = static_cast<unsigned>(header.dtype);
  if (kind == 0 || kind >= std::size(kFields)) {
    return fail(ErrorCode::kProtocol, fmt::format("a message header has the unknown kind {}", kind));
  }
  if (dtype >= kDtypeCount) {
    return fail(ErrorCode::kProtocol, fmt::format("a message header has the unknown dtype {}", dtype));
  }
  if (header.zero != 0 || !fits(header)) {
    return fail(ErrorCode::kProtocol, "a message header has fields that its kind does not use");
  }
  if (header.kind == MessageKind::kEager && header.bytes > kEagerBytes) {
    return fail(ErrorCode::kProtocol, fmt::format("an eager message of {} bytes is too long", header.bytes));
  }
  if (header.kind == MessageKind::kData && header.bytes == 0) {
    return fail(ErrorCode::kProtocol, "a piece of a message is empty");
  }
  return header;
}

}  // namespace muster
