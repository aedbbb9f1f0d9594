#pragma once

#include "muster/store/store.h"

namespace muster {

/// A store in an etcd cluster (3.4 or newer) at "etcd://[user:password@]host[:2379][,host2[:2379]...][/prefix]", or
/// "etcds://..." over TLS with ?ca=, ?cert= and ?key= (PEM files). Every operation is one transaction or a few that are
/// tried again when another client was faster; waits are etcd's own watches. What etcd limits is limited here: a value
/// and all values of one multi_set together to 1.5 MiB (--max-request-bytes), and a multi_set is atomic up to 128 keys
/// (--max-txn-ops). Meant for agents that meet, not for the traffic of a job: each add to a counter that many share
/// competes with the others.
Result<std::unique_ptr<Store>> etcd_store(const std::string& url, const Deadline& deadline);

}  // namespace muster
