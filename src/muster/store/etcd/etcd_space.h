#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "muster/store/etcd/etcd_client.h"
#include "muster/store/state/state.h"

namespace muster {

/// The names of a store's data in etcd. P is the store's prefix. A <key> in the middle of a name follows its length (8
/// hexadecimal digits), so no name is a prefix of another key's names.
///
///   P/k/<key>                            the keys and their values
///   P/q/<length><key>/<id>               a queue's items, in the order of their creation
///   P/b/<length><key>/round              a barrier's round, from 0; written again when an arrival is withdrawn
///   P/b/<length><key>/a/<round>/<count>/<id>   its arrivals in that round, 16 digits each; they have a lease
///   P/c/<name>                           a lock, with the lease that its holder renews
class EtcdSpace {
 public:
  EtcdSpace(std::shared_ptr<EtcdClient> client, std::string prefix)
      : client_(std::move(client)), prefix_(std::move(prefix)) {}

  std::string data(const Key& key) const { return prefix_ + "/k/" + key; }
  std::string queue(const Key& key) const { return framed("/q/", key) + "/"; }
  std::string barrier(const Key& key) const { return framed("/b/", key) + "/"; }
  std::string claim(const Key& name) const { return prefix_ + "/c/" + name; }

  const std::shared_ptr<EtcdClient>& client() const { return client_; }
  Result<etcd::Json> range(const EtcdRange& range, etcd::Json options, const Deadline& deadline) const;
  /// If all conditions of `compare` hold, carries out the operations of `success`, otherwise those of `failure`.
  Result<etcd::Json> transact(std::vector<etcd::Json> compare, std::vector<etcd::Json> success,
                              std::vector<etcd::Json> failure, const Deadline& deadline) const;
  /// The lease of this store, for keys that must not outlive the process by more than a minute. A call that waits must
  /// call this function from time to time, because that renews the lease.
  Result<int64_t> lease(const Deadline& deadline);

 private:
  std::string framed(const char* kind, const Key& key) const;

  Result<int64_t> renewed_lease(int64_t held, const Deadline& deadline) const;

  const std::shared_ptr<EtcdClient> client_;
  const std::string prefix_;
  std::mutex mutex_;  // guards the members below; not held during requests
  std::condition_variable asked_;
  int64_t lease_ = 0;
  TimePoint renewed_;
  bool asking_ = false;  // true while one caller renews the lease for all callers
};

/// Store::barrier() over etcd.
Result<> etcd_barrier(EtcdSpace& space, const Key& key, int64_t count, const Deadline& deadline);
/// Store::claim() and claims() over etcd.
Result<std::unique_ptr<TtlLock>> etcd_claim(const EtcdSpace& space, const Key& name, ByteView value,
                                            Duration time_to_live, const Deadline& deadline);

}  // namespace muster
