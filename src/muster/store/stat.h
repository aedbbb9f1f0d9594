#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "muster/store/state/state.h"

namespace muster {

/// The current contents of a store, and its work since its start. A figure that a store does not have stays zero. For
/// example, a store without a server has no clients.
struct StoreStat {
  uint64_t clients = 0;  ///< connections that completed the handshake
  uint64_t keys = 0, queues = 0, waiters = 0;
  uint64_t operations = 0;  ///< requests carried out, including cancellations
  /// The operations by name(StoreOperation). Unused operations are absent.
  std::map<std::string, uint64_t> operations_by_kind;
  uint64_t bytes_in = 0, bytes_out = 0;        ///< traffic of clients, without the handshake and TLS
  uint64_t messages_in = 0, messages_out = 0;  ///< whole requests and replies
  double cpu_seconds = 0;                      ///< user and system time of the server's threads
  double uptime_seconds = 0;
  uint64_t threads = 0;
};

/// The reply to kStat: names in `keys`, 64-bit numbers in `values`. A reader skips unknown names, so the two ends may
/// have different versions.
void put_stat(const StoreStat& stat, Reply& reply);
Result<StoreStat> stat_of(const Reply& reply);

}  // namespace muster
