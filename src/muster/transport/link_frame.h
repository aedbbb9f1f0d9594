#pragma once

#include "muster/io/frame.h"
#include "muster/transport/link.h"

namespace muster {

/// The kinds of frames between the ends of a link; their grammar heads socket_link.cpp. Append only.
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

/// No frame but data is longer.
inline constexpr uint32_t kMaxControlFrame = 3072;

/// A close frame with `why`, or a goodbye for null. Overlong texts are cut.
Bytes encode_close(const Error* why);
/// What a close or goodbye frame from `peer` says; kProtocol for what is neither, or blames a rank that is none.
Error parse_close(const FrameHeader& header, ByteView payload, const Peer& peer);

/// Whether a frame is a note of a length that one may have.
inline bool is_control(const FrameHeader& header) {
  return header.kind == static_cast<uint8_t>(LinkFrame::kControl) && header.length > 0 &&
         header.length <= kMaxControlMessage;
}

/// Why a link failed, as its owner sees it: what a socket reports about a dead peer becomes kPeerLost; names the peer.
Error link_error(const Error& error, const Peer& peer);

}  // namespace muster
