// Both sides of the handshake. Input: mode, piece size, bytes.
//   mode 0, 1: the bytes go to a server, to a client
//   mode 2:    a client and a server shake hands through a man in the middle: 3 bytes for each change (where:u16,
//   mask:u8)
// A peer without the secret must never be accepted, and neither must a hello that was changed on the way.
#include <algorithm>

#include "muster/base/check.h"
#include "muster/io/connect/handshake.h"

namespace muster {
namespace {

using Side = Handshake::Side;
const Bytes kSecret = to_bytes("the secret");
const Bytes kClientHello = to_bytes("client hello");
const Bytes kServerHello = to_bytes("server hello");

void feed_in_pieces(Handshake& end, ByteView bytes, size_t piece) {
  while (!bytes.empty()) {
    const auto used = end.feed(bytes.first(std::min(piece, bytes.size())));
    MUSTER_CHECK(!used || *used <= std::min(piece, bytes.size()), "more was used than was there");
    if (!used || end.done()) return;
    bytes = bytes.subspan(*used);
    (void)end.take_output();
  }
}

/// The bytes of one side on their way to the other, with the fuzzer's changes by position in that direction.
struct Wire {
  Bytes changes;
  size_t passed = 0;
  bool tampered = false;

  Bytes transfer(Bytes bytes) {
    for (size_t i = 0; i + 3 <= changes.size(); i += 3) {
      const size_t where = changes[i] | changes[i + 1] << 8;
      if (where < passed || where >= passed + bytes.size() || changes[i + 2] == 0) continue;
      bytes[where - passed] ^= changes[i + 2];
      tampered = true;
    }
    passed += bytes.size();
    return bytes;
  }
};

void run_handshake(ByteView changes, size_t piece) {
  Handshake client(Side::kClient, kSecret, kClientHello), server(Side::kServer, kSecret, kServerHello);
  Wire up{Bytes(changes.begin(), changes.begin() + static_cast<ptrdiff_t>(changes.size() / 2))};
  Wire down{Bytes(changes.begin() + static_cast<ptrdiff_t>(changes.size() / 2), changes.end())};
  for (int turn = 0; turn < 3; ++turn) {
    const Bytes to_server = up.transfer(client.take_output());
    Bytes to_client;
    for (ByteView rest = to_server; !rest.empty();) {
      const size_t count = std::min(piece, rest.size());
      const bool alive = server.feed(rest.first(count)).has_value();
      const Bytes sent = down.transfer(server.take_output());
      to_client.insert(to_client.end(), sent.begin(), sent.end());
      if (!alive) break;
      rest = rest.subspan(count);
    }
    if (!client.feed(to_client)) break;
  }
  MUSTER_CHECK(!server.done() || server.peer_hello() == kClientHello, "the server believed a changed hello");
  MUSTER_CHECK(!client.done() || client.peer_hello() == kServerHello, "the client believed a changed hello");
  const bool tampered = up.tampered || down.tampered;
  MUSTER_CHECK(tampered || (server.done() && client.done()), "an unchanged handshake failed");
}

}  // namespace
}  // namespace muster

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const size_t piece = data[1] % 64 + 1;
  const muster::ByteView bytes(data + 2, size - 2);
  if (data[0] % 3 == 2) {
    muster::run_handshake(bytes, piece);
    return 0;
  }
  muster::Handshake end(data[0] % 3 == 0 ? muster::Side::kServer : muster::Side::kClient, muster::kSecret, {});
  muster::feed_in_pieces(end, bytes, piece);
  MUSTER_CHECK(!end.done() && end.peer_hello().empty(), "an unauthenticated peer was accepted");
  return 0;
}
