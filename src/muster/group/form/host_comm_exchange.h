#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "muster/base/clock.h"
#include "muster/io/connection.h"
#include "muster/io/fd.h"
#include "muster/io/loop.h"

namespace muster {

/// Hands the host communicator's memory from the first rank of a host to the other ranks of the host, over a Unix
/// socket of its own. Without memory the first rank hands out nothing, and the group does without.
class HostCommExchange {
 public:
  using Interrupted = std::function<std::optional<Error>()>;

  /// At `address` the first rank listens; `secret` is the group's.
  HostCommExchange(Loop& loop, const Bytes& secret, Address address, const Deadline& deadline);
  ~HostCommExchange();
  HostCommExchange(const HostCommExchange&) = delete;
  HostCommExchange& operator=(const HostCommExchange&) = delete;

  /// First rank: allocates the memory for `ranks` and listens.
  Result<> offer(int ranks);
  /// First rank: waits until the other ranks have the memory. Empty if there is none.
  Result<Fd> serve(const Interrupted& interrupted);
  /// Other ranks: empty if the first rank has none.
  Result<Fd> receive();
  /// Why the first rank has no memory, once offer() has found out.
  const std::optional<Error>& no_memory() const { return no_memory_; }

 private:
  void await_request(Connection connection);
  void answer_request(int fd);

  Loop& loop_;
  const Credentials credentials_;
  const Address address_;
  const Deadline deadline_;
  Fd memory_;
  std::optional<Error> no_memory_, error_;
  std::unique_ptr<Acceptor> acceptor_;
  std::vector<Connection> connections_;
  int waiting_ = 0;  ///< ranks that do not have the memory yet
};

}  // namespace muster
