#pragma once

#include "muster/store/store.h"

namespace muster {

/// A store in an etcd cluster (3.4 or newer) at "etcd://[user:password@]host[:2379][,host2[:2379]...][/prefix]", or
/// "etcds://..." over TLS with ?ca=, ?cert= and ?key= (PEM files). An operation is one transaction, or a few
/// transactions that are repeated if another client changed the key first. A wait uses an etcd watch. etcd's limits
/// apply: a request has at most 1.5 MiB (--max-request-bytes), and a multi_set is atomic up to 128 keys
/// (--max-txn-ops). This store is meant for the rendezvous of agents, not for the traffic of a job: concurrent adds to
/// one key conflict and are repeated.
Result<std::unique_ptr<Store>> etcd_store(const std::string& url, const Deadline& deadline);

}  // namespace muster
