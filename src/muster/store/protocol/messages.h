#pragma once

#include <optional>

#include "muster/io/frame.h"
#include "muster/store/state/state.h"

namespace muster {

/// The frames of muster's own store protocol and of the file store's log. The grammar heads messages.cpp.
inline constexpr uint8_t kReplyKind = 128;
/// The largest payload of a request or a reply: a value of the largest size, its key and the headers.
inline constexpr uint32_t kMaxMessageBytes = kMaxValueBytes + (8 << 20);

/// kResourceExhausted if the keys and values together exceed kMaxMessageBytes.
Result<Bytes> encode_request(const Request& request);
/// A reply over kMaxMessageBytes is encoded as an error instead.
Bytes encode_reply(const Reply& reply);

/// Clears the lease flag of encoded replies, which follow each other.
void withdraw_leases(Bytes& replies);

/// The bytes may be hostile: kProtocol for anything that the grammar does not allow.
Result<Request> decode_request(const FrameHeader& header, ByteView payload);
/// Leaves the reply's client 0.
Result<Reply> decode_reply(const FrameHeader& header, ByteView payload);
/// The parser's next reply, or nothing if there is no whole one yet.
Result<std::optional<Reply>> next_reply(FrameParser& parser);

}  // namespace muster
