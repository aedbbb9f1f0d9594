#pragma once

#include <memory>
#include <optional>

#include "muster/store/state/state.h"

namespace muster {

/// Translates one client's bytes to requests, and replies to bytes. Knows no socket. Not thread-safe.
class Protocol {
 public:
  virtual ~Protocol() = default;
  /// Adds bytes from the client. They may begin and end in the middle of a request.
  virtual void feed(ByteView bytes) = 0;
  /// The next whole request, or nothing if it has not arrived yet. After kProtocol the client must be closed. Appends
  /// to `out` the answers to requests that need no store.
  virtual Result<std::optional<Request>> next(Bytes& out) = 0;
  /// Appends the reply's bytes to `out`. Returns an error if the protocol cannot express the reply. The client must
  /// then be closed.
  virtual Result<> encode(const Reply& reply, Bytes& out) = 0;
  /// True while a request is incomplete, or while the first request that the protocol demands has not arrived.
  virtual bool midway() const { return false; }
};

/// messages.cpp has the grammar.
std::unique_ptr<Protocol> muster_protocol();
/// PyTorch's TCPStore protocol, as of torch 2.11 to 2.15. See the head of protocol_torch.cpp. Its clients see only keys
/// that begin with `prefix`, and see them without the prefix.
std::unique_ptr<Protocol> torch_protocol(Key prefix = {});

}  // namespace muster
