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

namespace muster {

using Key = std::string;
class TtlLock;
struct StoreStat;

/// A key-value store that the processes of a job share: every operation of torch's c10d::Store.
/// All implementations are thread-safe. A missing or late answer is kTimeout and names the keys; a lost server is
/// kPeerLost with its address.
class Store {
 public:
  virtual ~Store() = default;

  virtual Result<> set(const Key& key, ByteView value, const Deadline& deadline) = 0;
  /// Waits until the key exists.
  virtual Result<Bytes> get(const Key& key, const Deadline& deadline) = 0;
  /// Sets `desired` if the value equals `expected` (an absent key equals empty), and returns the value afterwards; an
  /// absent key with a non-empty `expected` returns `expected`, as torch's stores do.
  virtual Result<Bytes> compare_set(const Key& key, ByteView expected, ByteView desired, const Deadline& deadline) = 0;
  /// Adds to a counter (decimal text, as torch keeps it; absent is 0) and returns the sum.
  virtual Result<int64_t> add(const Key& key, int64_t amount, const Deadline& deadline) = 0;
  /// Whether all keys exist now.
  virtual Result<bool> check(const std::vector<Key>& keys, const Deadline& deadline) = 0;
  virtual Result<> wait(const std::vector<Key>& keys, const Deadline& deadline) = 0;
  /// True if the key was there.
  virtual Result<bool> delete_key(const Key& key, const Deadline& deadline) = 0;
  virtual Result<int64_t> num_keys(const Deadline& deadline) = 0;
  virtual Result<> append(const Key& key, ByteView value, const Deadline& deadline) = 0;
  /// Waits until all exist; values in the order of the keys.
  virtual Result<std::vector<Bytes>> multi_get(const std::vector<Key>& keys, const Deadline& deadline) = 0;
  virtual Result<> multi_set(const std::vector<Key>& keys, const std::vector<Bytes>& values,
                             const Deadline& deadline) = 0;
  virtual Result<> queue_push(const Key& key, ByteView value, const Deadline& deadline) = 0;
  /// Oldest first; waits until there is one. After kTimeout nothing was taken, unless the server stood still for a
  /// second beyond the deadline: then what it took is lost.
  virtual Result<Bytes> queue_pop(const Key& key, const Deadline& deadline) = 0;
  virtual Result<int64_t> queue_length(const Key& key, const Deadline& deadline) = 0;
  virtual Result<std::vector<Key>> list_keys(std::string_view prefix, const Deadline& deadline) = 0;
  /// Returns when `count` callers have arrived at `key`. Reusable: the next `count` form the next round.
  virtual Result<> barrier(const Key& key, int64_t count, const Deadline& deadline) = 0;
  /// What the store holds and has done (stat.h): of the server at the root, where there is one. kUnsupported by those
  /// that do not count.
  virtual Result<StoreStat> stat(const Deadline& deadline);
  /// Claims `name` for this process (claim.h): others see it in claims() until it is given up, or until `time_to_live`
  /// after its holder died. kAlreadyExists while another holds it. Claims are a space of their own beside the keys.
  /// kUnsupported but for memory, Redis and etcd.
  virtual Result<std::unique_ptr<TtlLock>> claim(const Key& name, ByteView value, Duration time_to_live,
                                                 const Deadline& deadline);
  /// The names beginning with `prefix` that are held now, with the values that their holders gave.
  virtual Result<std::map<Key, Bytes>> claims(std::string_view prefix, const Deadline& deadline);
  /// Another handle on the same data, with its own connection where there is one.
  virtual Result<std::unique_ptr<Store>> clone() = 0;
};

/// Adds "prefix/" to every key of a store that it borrows (the borrowed one must outlive it).
std::unique_ptr<Store> prefix_store(std::string prefix, Store& base);
/// The same, owning the store below.
std::unique_ptr<Store> prefix_store(std::string prefix, std::unique_ptr<Store> base);
/// In this process' memory; clones share it.
std::unique_ptr<Store> memory_store();
/// In a file that several processes open (also over NFS with working locks). The file is created when it is missing.
Result<std::unique_ptr<Store>> file_store(const std::string& path);

/// Opens by URL: "file:///path", "tcp://host:port" (muster's own dialect), "unix:/path" or "unix:@name", "memory:",
/// "redis://..." (redis_store.h) and "etcd://..." (etcd_store.h); a build may lack the last two: kUnsupported.
/// An unknown scheme is kInvalidArgument and lists those that are known. `secret`: the job's, see io/handshake.h.
Result<std::unique_ptr<Store>> open_store(const std::string& url, ByteView secret, const Deadline& deadline);
/// What `muster run` gave this process: MUSTER_STORE (a URL) and MUSTER_SECRET (hex). With MUSTER_GENERATION set, the
/// keys of that generation of the job.
Result<std::unique_ptr<Store>> store_from_environment(const Deadline& deadline);

}  // namespace muster
