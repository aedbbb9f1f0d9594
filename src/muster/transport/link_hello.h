#pragma once

#include "muster/transport/socket/socket_link.h"

namespace muster {

inline constexpr int kMaxSubflows = 16;

/// The description of itself that each end of a link sends in the handshake. The grammar is at the head of
/// link_hello.cpp.
struct LinkHello : Peer {
  enum class Wire : uint8_t { kSocket = 1, kShm = 2 };  // append only
  Wire wire = Wire::kSocket;
  uint64_t generation = 0;
  std::string group;
};

/// The hello of this process. kInvalidArgument for a rank outside 0..size-1, a name that is too long, or more than
/// kMaxSubflows.
Result<LinkHello> make_hello(const LinkIdentity& self, LinkHello::Wire wire);
Bytes encode(const LinkHello& hello);
/// kProtocol for anything that is not a hello.
Result<LinkHello> parse_hello(ByteView bytes);

/// kMismatch, with both values, if the two ends do not belong together. `expected`: the rank that was dialed, or
/// kNoRank.
Result<> check_hello(const LinkHello& self, const LinkHello& peer, Rank expected);

}  // namespace muster
