#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "muster/store/state/state.h"

namespace muster {

/// What a store holds now, and what it has done since it began. What a store does not know stays zero: one without a
/// server has no clients.
struct StoreStat {
  uint64_t clients = 0;  ///< connections that have been through the door
  uint64_t keys = 0, queues = 0, waiters = 0;
  uint64_t operations = 0;  ///< requests carried out, cancellations too
  /// The same by kind, under name(StoreOperation); kinds that were not used are left out.
  std::map<std::string, uint64_t> operations_by_kind;
  uint64_t bytes_in = 0, bytes_out = 0;        ///< of clients, as the dialects see them
  uint64_t messages_in = 0, messages_out = 0;  ///< whole requests and replies
  double cpu_seconds = 0;                      ///< of the server's threads, user and system
  double uptime_seconds = 0;
  uint64_t threads = 0;
};

/// A stat as the body of kStat's reply: names in `keys`, 64-bit numbers in `values`. A reader skips names that it does
/// not know, so that the two ends may differ in age.
void put_stat(const StoreStat& stat, Reply& reply);
Result<StoreStat> stat_of(const Reply& reply);

}  // namespace muster
