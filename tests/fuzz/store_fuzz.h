#pragma once

#include <algorithm>
#include <cstdlib>

#include "muster/store/protocol/protocol.h"

namespace muster {

/// Simulates a hostile client of a protocol and a store. The first byte says how the rest is cut into reads.
inline void play_client(Protocol& protocol, ByteView input) {
  if (input.empty()) return;
  const size_t chunk = size_t{1} + input[0];
  input = input.subspan(1);
  StoreState state;
  Bytes out;
  constexpr ClientId kClient = 1;
  while (!input.empty()) {
    const size_t size = std::min(chunk, input.size());
    protocol.feed(input.first(size));
    input = input.subspan(size);
    while (true) {
      auto request = protocol.next(out);
      if (!request) return;  // the protocol closes the connection
      if (!*request) break;
      for (const Reply& reply : state.apply(std::move(**request), kClient)) {
        if (reply.client != kClient) std::abort();
        if (!protocol.encode(reply, out)) return;
      }
    }
    out.clear();
  }
  state.drop(kClient);
  if (state.waiters() != 0) std::abort();
}

}  // namespace muster
