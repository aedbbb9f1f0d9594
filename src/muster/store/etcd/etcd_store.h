#pragma once

#include "muster/store/store.h"

namespace muster {

/// A store in an etcd cluster (3.4 or newer) at "etcd://[user:password@]host[:2379][,host2[:2379]...][/prefix]", or
/// "etcds://..." over TLS with ?ca=, ?cert= and ?key= (PEM files). An operation is one transaction, or a few that are
/// repeated if another client was faster. Waits are etcd's watches. etcd's limits apply: a request has at most 1.5 MiB
/// (--max-request-bytes), and a multi_set is atomic up to 128 keys (--max-txn-ops). Meant for the rendezvous of agents,
/// not for the traffic of a job: clients that add to the same counter compete.
Result<std::unique_ptr<Store>> etcd_store(const std::string& url, const Deadline& deadline);

}  // namespace muster
