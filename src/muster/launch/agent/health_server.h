#pragma once

#include <map>
#include <memory>

#include "muster/io/address.h"
#include "muster/io/fd.h"
#include "muster/io/loop.h"
#include "muster/launch/options/options.h"
#include "muster/launch/timer.h"

namespace muster {

/// Answers every HTTP request with "200 OK" as long as the agent's loop runs: the liveness probe of a cluster. It
/// parses nothing. A client that sends nothing, or does not close, is closed after a few seconds.
class HealthServer {
 public:
  /// Listens on the port in TORCHELASTIC_HEALTH_CHECK_PORT, on all interfaces; null without that variable.
  /// kInvalidArgument if its value is not a port.
  static Result<std::unique_ptr<HealthServer>> from_environment(Loop& loop, const Environment& environment);
  static Result<std::unique_ptr<HealthServer>> listen(Loop& loop, const Address& address);
  ~HealthServer();
  HealthServer(const HealthServer&) = delete;
  HealthServer& operator=(const HealthServer&) = delete;

  const Address& address() const { return address_; }

 private:
  struct Client;
  HealthServer(Loop& loop, Fd listener, Address address);
  Result<> watch();
  void accept();
  void serve(int fd);
  void drop(int fd);

  Loop& loop_;
  Fd listener_;
  const Address address_;
  std::map<int, std::unique_ptr<Client>> clients_;  // by descriptor
  Timer pause_{loop_};                              // until the next accept, after one that failed
};

}  // namespace muster
