#pragma once

#include <memory>
#include <optional>

#include "muster/store/state/state.h"

namespace muster {

/// One client's side of a protocol: bytes to Request, Reply to bytes. No socket in here. Not thread-safe.
class Protocol {
 public:
  virtual ~Protocol() = default;
  /// Adds bytes as they came from the client, however they were cut.
  virtual void feed(ByteView bytes) = 0;
  /// The next whole request, nothing if there is none yet, or kProtocol (the client must be cut off). What the dialect
  /// answers by itself goes to `out`.
  virtual Result<std::optional<Request>> next(Bytes& out) = 0;
  /// Appends the reply's bytes to `out`. An error means that the dialect cannot say it: the client must be cut off.
  virtual Result<> encode(const Reply& reply, Bytes& out) = 0;
  /// Whether the client owes bytes: of a request that has begun, or the first that its protocol demands.
  virtual bool midway() const { return false; }
};

/// See the head of protocol_muster.cpp for the grammar.
std::unique_ptr<Protocol> muster_dialect();
/// PyTorch's TCPStore protocol, as of torch 2.11 to 2.13. See the head of protocol_torch.cpp. Its clients see only keys
/// that begin with `prefix`, and do not see the prefix.
std::unique_ptr<Protocol> torch_dialect(Key prefix = {});

}  // namespace muster
