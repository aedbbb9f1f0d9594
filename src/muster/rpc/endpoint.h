#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/io/connection.h"
#include "muster/rpc/agent.h"
#include "muster/rpc/relay.h"
#include "muster/store/store.h"

namespace muster::rpc {

struct EndpointOptions {
  std::string name;           ///< of this worker; unique in its group
  std::string group = "rpc";  ///< workers of different groups do not see each other
  Credentials credentials;    ///< empty secret: the first worker generates one and shares it through the store
  std::string interface;      ///< for TCP, by name or address; empty: io/outward_address.h chooses
  /// Which transports may be used, best first: "shm", "unix" and "tcp". Workers of one host use the first one.
  std::string transports = "shm,tcp";
  /// Carries all connections, in place of the transports above. All workers of the group have one, or none.
  std::shared_ptr<Relay> relay;
  int tcp_streams = 1;    ///< connections in each TCP link, 1 to 16, the same at all workers
  int max_handlers = 16;  ///< functions that run at a time; a function that waits for a call does not count
  uint64_t max_message_bytes = uint64_t{16} << 30;
  size_t max_queued_calls = 1 << 16;  ///< calls to one worker that wait to be sent; more fail at once
  Duration timeout = 60s;             ///< of joining
  /// All workers join before the first call is made. So a call to a name that no worker has fails at once. By default
  /// it waits until a worker with this name joins.
  bool fixed_members = false;
  /// Called before other workers can find this one: here it adds its functions. If this fails, the worker does not
  /// join.
  std::function<Result<>(Agent&)> setup;
  /// A worker that sends nothing for so long, while calls to it are pending, counts as lost.
  Duration heartbeat_timeout = 30s;
};

/// The most calls that a worker may have sent to another one and whose functions have not started, and the most bytes
/// of their arguments. A call may be larger than that. The called worker closes the link of a caller that sends more
/// (CallWindow in peer_calls.h has the rules). Functions that run, and replies, need no room. So calls that wait for
/// nested calls cannot block each other. But if a caller leaves more than kMaxBytesInFlight of replies unread, its next
/// functions start later.
inline constexpr int kMaxCallsInFlight = 4096;
inline constexpr uint64_t kMaxBytesInFlight = uint64_t{64} << 20;

/// Joins the group of workers that meet in `store`, and serves calls from then on, on threads of its own. It connects
/// to a worker at the first call to it: through shared memory or a Unix socket on the same host, else over TCP.
///
/// kAlreadyExists if a living worker has this name.
Result<std::shared_ptr<Agent>> start_endpoint(std::shared_ptr<Store> store, EndpointOptions options);

/// Joins the job that this process was started for, as Group::join_job() does. The environment gives the store and the
/// secret. It also gives the timeout, the interface, the transports and the streams if `options` has their default
/// values. `options.name`: if it is empty, the name is "worker<RANK>". In a job that no launcher started, the process
/// with RANK 0 serves the store until its agent is destroyed, so it must leave last.
Result<std::shared_ptr<Agent>> join_job(EndpointOptions options = {});

}  // namespace muster::rpc
