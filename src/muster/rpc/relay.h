#pragma once

#include <string>

#include "muster/io/address.h"

namespace muster::rpc {

/// Carries the connections between workers over something else than sockets between them. Each worker has one. To
/// connect to another worker, it connects to a Unix socket of its own relay; the relay of the other worker then
/// connects to that worker's Unix socket. Bytes arrive in order and unchanged. The workers authenticate each other
/// through it. Thread-safe.
class Relay {
 public:
  virtual ~Relay() = default;
  /// The address of this worker for other workers, of any form. `own`: the Unix socket that this worker listens on.
  virtual Result<std::string> publish(const Address& own) = 0;
  /// The Unix socket that leads to the worker that has published this. kInvalidArgument for a text of another form.
  virtual Result<Address> route(const std::string& published) = 0;
};

}  // namespace muster::rpc
