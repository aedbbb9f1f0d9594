#pragma once

#include "muster/io/frame.h"
#include "muster/transport/link.h"

namespace muster {

/// The kinds of frames between the ends of a link. The grammar is at the head of socket_link.cpp. Append only.
enum class LinkFrame : uint8_t {
  kOpen = 1,
  kData = 2,
  kClose = 3,
  kShutdown = 4,
  kDoorbell = 5,
  kPing = 6,
  kPong = 7,
  kControl = 8,
};

/// The longest payload of a frame that is not data.
inline constexpr uint32_t kMaxControlFrame = 3072;

/// A close frame with `why`, or a shutdown frame for null. Long texts are truncated.
Bytes encode_close(const Error* why);
/// The error in a close or shutdown frame from `peer`. kProtocol for other frames, and for an impossible rank.
Error parse_close(const FrameHeader& header, ByteView payload, const Peer& peer);

/// True for a control frame of a valid length.
inline bool is_control(const FrameHeader& header) {
  return header.kind == static_cast<uint8_t>(LinkFrame::kControl) && header.length > 0 &&
         header.length <= kMaxControlMessage;
}

/// The error of a link, from the error of its socket: names the peer, and turns errors of a dead peer into kPeerLost.
Error link_error(const Error& error, const Peer& peer);

}  // namespace muster
