#pragma once

#include "muster/transport/socket/socket_link.h"

namespace muster {

inline constexpr int kMaxSubflows = 16;

/// What the two ends of a link tell each other in the handshake. The grammar heads hello.cpp.
struct LinkHello {
  enum class Wire : uint8_t { kSocket = 1, kShm = 2 };  // append only
  Wire wire = Wire::kSocket;
  Rank rank = kNoRank;
  int size = 0;
  uint64_t generation = 0;
  pid_t pid = 0;
  std::string group;
  std::string host;
  Subflow subflow = {};
};

/// This process's own. kInvalidArgument when the identity makes no sense (rank outside of 0..size-1, endless name, more
/// than kMaxSubflows).
Result<LinkHello> make_hello(const LinkIdentity& self, LinkHello::Wire wire);
Bytes encode(const LinkHello& hello);
/// kProtocol for anything that is not a hello.
Result<LinkHello> parse_hello(ByteView bytes);

/// Whether the two belong together; kMismatch names both values. `expected` is the rank that was dialled, or kNoRank.
Result<> check_hello(const LinkHello& self, const LinkHello& peer, Rank expected);

Peer peer_of(const LinkHello& hello, const Address& address);

}  // namespace muster
