#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/clock.h"
#include "muster/io/address.h"

namespace muster {

using Key = std::string;
class TtlLock;
struct Reply;
struct Request;
struct StoreStat;

/// A key-value store that the processes of a job share, with every operation of torch's c10d::Store. All
/// implementations are thread-safe. A call that is not answered in time fails with kTimeout, and the message names the
/// keys. If the server is lost, a call fails with kPeerLost, and the message names the address.
class Store {
 public:
  virtual ~Store() = default;

  Result<> set(const Key& key, ByteView value, const Deadline& deadline);
  /// Waits until the key exists.
  Result<Bytes> get(const Key& key, const Deadline& deadline);
  /// Sets `desired` if the value equals `expected` (an absent key equals an empty value), and returns the new value.
  /// For an absent key and a non-empty `expected` it returns `expected`, as torch's stores do.
  Result<Bytes> compare_set(const Key& key, ByteView expected, ByteView desired, const Deadline& deadline);
  /// Adds to a counter and returns the sum. The value is decimal text, as in torch. An absent key counts as 0.
  Result<int64_t> add(const Key& key, int64_t amount, const Deadline& deadline);
  /// True if all keys exist now.
  Result<bool> check(const std::vector<Key>& keys, const Deadline& deadline);
  Result<> wait(const std::vector<Key>& keys, const Deadline& deadline);
  /// True if the key existed.
  Result<bool> delete_key(const Key& key, const Deadline& deadline);
  Result<int64_t> num_keys(const Deadline& deadline);
  Result<> append(const Key& key, ByteView value, const Deadline& deadline);
  /// Waits until all keys exist. Returns the values in the order of the keys.
  Result<std::vector<Bytes>> multi_get(const std::vector<Key>& keys, const Deadline& deadline);
  Result<> multi_set(const std::vector<Key>& keys, const std::vector<Bytes>& values, const Deadline& deadline);
  Result<> queue_push(const Key& key, ByteView value, const Deadline& deadline);
  /// Removes and returns the oldest item. Waits until there is an item. After kTimeout no item was removed, with one
  /// exception: if the server does not answer for a second after the deadline, an item may be lost.
  Result<Bytes> queue_pop(const Key& key, const Deadline& deadline);
  Result<int64_t> queue_length(const Key& key, const Deadline& deadline);
  /// Returns the keys with this prefix, sorted. A server scans a store of over 4,000 keys in steps, so a key that is
  /// set or deleted during the scan may be in the result or not.
  Result<std::vector<Key>> list_keys(std::string_view prefix, const Deadline& deadline);
  /// Returns when `count` callers have arrived at `key`. The next `count` callers form the next round.
  Result<> barrier(const Key& key, int64_t count, const Deadline& deadline);
  /// Statistics of the store, or of the root server (stat.h). kUnsupported if the store keeps no statistics.
  Result<StoreStat> stat(const Deadline& deadline);
  /// Takes the lock `name` for this process (ttl_lock.h). Other processes see it in claims() until it is released, or
  /// until `time_to_live` after its holder died. kAlreadyExists while another process holds it. Locks are not keys.
  /// Only memory, Redis and etcd stores have locks. Other stores return kUnsupported.
  virtual Result<std::unique_ptr<TtlLock>> claim(const Key& name, ByteView value, Duration time_to_live,
                                                 const Deadline& deadline);
  /// The names of the locks with this prefix that are held now, with the values of their holders.
  virtual Result<std::map<Key, Bytes>> claims(std::string_view prefix, const Deadline& deadline);
  /// The host and port of the server, for a store that is in one: "tcp://...", "redis://..." and "rediss://...".
  virtual std::optional<HostPort> address() const { return std::nullopt; }
  /// Another handle on the same data. If there is a server, the clone has its own connection.
  virtual Result<std::unique_ptr<Store>> clone() = 0;

  /// For implementations and wrappers: carries out a request (state/state.h), and returns its reply or the error in its
  /// status. The functions above without `virtual` are requests. The implementation sets `request.id`.
  virtual Result<Reply> call(Request request, const Deadline& deadline) = 0;
};

/// Adds "prefix/" to every key. Borrows the base store, which must outlive it.
std::unique_ptr<Store> prefix_store(std::string prefix, Store& base);
/// The same, but owns the base store.
std::unique_ptr<Store> prefix_store(std::string prefix, std::unique_ptr<Store> base);
/// A store in this process's memory, which clones share.
std::unique_ptr<Store> memory_store();
/// A store in a file that several processes may open, also over NFS if its file locks work. Creates the file if it does
/// not exist.
Result<std::unique_ptr<Store>> file_store(const std::string& path);

/// Opens a store by URL: "file:///path", "tcp://host:port" (muster's own protocol), "unix:/path" or "unix:@name",
/// "memory:", "redis://..." and "rediss://..." (redis_store.h) and "etcd://..." (etcd_store.h). The last two are
/// kUnsupported in a build without them. `secret` is the job's secret, see io/connect/handshake.h. kInvalidArgument if
/// the scheme is unknown or the secret is shorter than 16 bytes; an empty secret means that there is none.
Result<std::unique_ptr<Store>> open_store(const std::string& url, ByteView secret, const Deadline& deadline);
/// The store that `muster run` gave this process: MUSTER_STORE is its URL, MUSTER_SECRET the secret in hex. If
/// MUSTER_GENERATION is set, the store shows only the keys of that generation of the job.
Result<std::unique_ptr<Store>> store_from_environment(const Deadline& deadline);

}  // namespace muster
