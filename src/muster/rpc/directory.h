#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/io/host_identity.h"
#include "muster/rpc/agent.h"
#include "muster/store/store.h"

namespace muster::rpc {

/// What a worker publishes about itself. The grammar is at the head of directory.cpp.
struct WorkerRecord {
  WorkerInfo worker;
  std::string host;
  ProcessIdentity process;
  std::string memory_domain;  ///< workers with equal domains can share memory (io/host_identity.h)
  std::string local_address;  ///< for workers of this host; empty: none
  std::string tcp_address;    ///< for all others; empty: none

  /// "worker "ps" (id 3, host b, pid 812)".
  std::string to_string() const;
};
Bytes encode(const WorkerRecord& record);
/// kMismatch for a record of another version, kProtocol for other bytes.
Result<WorkerRecord> parse_worker_record(ByteView bytes);

/// The workers of one RPC group, in a store. Thread-safe, because the store is.
class Directory {
 public:
  /// `group`: processes with different names do not see each other.
  Directory(std::shared_ptr<Store> store, const std::string& group);

  /// The secret that all workers of the group share: `own` if it is not empty, else one that the first worker
  /// generates.
  Result<Bytes> agree_on_secret(const Bytes& own, const Deadline& deadline);
  /// A number that no worker of the group had before.
  Result<int> new_id(const Deadline& deadline);
  /// Publishes the record. A worker that has the same name already is replaced if it does not answer any more, else the
  /// result is kAlreadyExists.
  Result<> join(const WorkerRecord& self, const Deadline& deadline);
  /// Removes the record that join() has published.
  Result<> leave(const WorkerRecord& self, const Deadline& deadline);

  /// The worker that has this name now, if there is one.
  Result<std::optional<WorkerRecord>> find(const std::string& name, const Deadline& deadline);
  /// The workers that are present, sorted by id.
  Result<std::vector<WorkerRecord>> list(const Deadline& deadline);
  /// Waits until `count` callers have arrived.
  Result<> barrier(const std::string& name, int count, const Deadline& deadline);

 private:
  /// The value of a key, if it exists now.
  Result<std::optional<Bytes>> read(const std::string& key, const Deadline& deadline);

  const std::shared_ptr<Store> base_;
  const std::unique_ptr<Store> store_;  ///< base_, with the group's prefix
};

}  // namespace muster::rpc
