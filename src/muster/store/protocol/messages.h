#pragma once

#include <optional>

#include "muster/io/frame.h"
#include "muster/store/state/state.h"

namespace muster {

/// The frames of muster's own store dialect; messages.cpp has the grammar. The file store's log holds them too.
inline constexpr uint8_t kReplyKind = 128;
/// The greatest payload of a request or a reply: a value as large as the limit, and what goes with it.
inline constexpr uint32_t kMaxMessageBytes = kMaxValueBytes + (8 << 20);

/// kResourceExhausted when the keys and values together are over kMaxMessageBytes.
Result<Bytes> encode_request(const Request& request);
/// A reply over kMaxMessageBytes is encoded as the error that it is too large.
Bytes encode_reply(const Reply& reply);

/// Takes it out of encoded replies, one after another, that they grant leases.
void withdraw_leases(Bytes& replies);

/// Of bytes that nobody vouches for: kProtocol for anything that the grammar does not allow.
Result<Request> decode_request(const FrameHeader& header, ByteView payload);
/// The reply's client is left 0: a connection knows whose it is.
Result<Reply> decode_reply(const FrameHeader& header, ByteView payload);
/// How every client reads: the next reply of what the parser was fed, or nothing when it has no whole one yet.
Result<std::optional<Reply>> next_reply(FrameParser& parser);

}  // namespace muster
