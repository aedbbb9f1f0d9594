#pragma once

#include <optional>

#include "muster/io/frame.h"
#include "muster/store/state/state.h"

namespace muster {

/// The frames of muster's own store protocol and of the file store's log. The grammar is at the head of messages.cpp.
inline constexpr uint8_t kReplyKind = 128;
/// The largest payload of a request or a reply, in bytes: a value of the largest size, its key and the headers.
inline constexpr uint32_t kMaxMessageBytes = kMaxValueBytes + (8 << 20);

/// kResourceExhausted if the keys and values together exceed kMaxMessageBytes.
Result<Bytes> encode_request(const Request& request);
/// Encodes an error instead if the reply is over kMaxMessageBytes.
Bytes encode_reply(const Reply& reply);

/// Clears the lease flag of each reply. `replies` is a sequence of encoded replies.
void withdraw_leases(Bytes& replies);

/// Returns kProtocol for anything that the grammar does not allow, because the bytes may come from an attacker.
Result<Request> decode_request(const FrameHeader& header, ByteView payload);
/// The reply's client stays 0, because it is not part of a message.
Result<Reply> decode_reply(const FrameHeader& header, ByteView payload);
/// The parser's next reply, or nothing if no whole reply has arrived yet.
Result<std::optional<Reply>> next_reply(FrameParser& parser);

}  // namespace muster
