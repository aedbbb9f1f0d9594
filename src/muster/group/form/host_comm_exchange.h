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

/// Sends the host communicator's memory from the first rank of a host to the other ranks of the host, over its own Unix
/// socket. If the first rank cannot allocate the memory, the group works without a host communicator.
class HostCommExchange {
 public:
  using Interrupted = std::function<std::optional<Error>()>;

  /// The first rank listens at `address`. `secret` is the group's secret.
  HostCommExchange(Loop& loop, const Bytes& secret, Address address, const Deadline& deadline);
  ~HostCommExchange();
  HostCommExchange(const HostCommExchange&) = delete;
  HostCommExchange& operator=(const HostCommExchange&) = delete;

  /// First rank: allocates the memory for `ranks` and listens.
  Result<> offer(int ranks);
  /// First rank: waits until it has sent the memory to the other ranks, then returns it. Empty if there is no memory.
  Result<Fd> serve(const Interrupted& interrupted);
  /// Other ranks: waits for the memory. Empty if the first rank has none.
  Result<Fd> receive();
  /// First rank: the reason why offer() could not allocate the memory, if it could not.
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
