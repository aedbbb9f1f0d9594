#include "muster/store/stat.h"
#include "muster/store/ttl_lock.h"

namespace muster {
namespace {

class PrefixStore : public Store {
 public:
  PrefixStore(std::string prefix, Store& base, std::unique_ptr<Store> owned)
      : prefix_(std::move(prefix)), base_(base), owned_(std::move(owned)) {}

  Result<> set(const Key& key, ByteView value, const Deadline& deadline) override {
    return base_.set(full(key), value, deadline);
  }
  Result<Bytes> get(const Key& key, const Deadline& deadline) override { return base_.get(full(key), deadline); }
  Result<Bytes> compare_set(const Key& key, ByteView expected, ByteView desired, const Deadline& deadline) override {
    return base_.compare_set(full(key), expected, desired, deadline);
  }
  Result<int64_t> add(const Key& key, int64_t amount, const Deadline& deadline) override {
    return base_.add(full(key), amount, deadline);
  }
  Result<bool> check(const std::vector<Key>& keys, const Deadline& deadline) override {
    return base_.check(full(keys), deadline);
  }
  Result<> wait(const std::vector<Key>& keys, const Deadline& deadline) override {
    return base_.wait(full(keys), deadline);
  }
  Result<bool> delete_key(const Key& key, const Deadline& deadline) override {
    return base_.delete_key(full(key), deadline);
  }
  // Counts the keys of the whole store, as torch's PrefixStore does.
  Result<int64_t> num_keys(const Deadline& deadline) override { return base_.num_keys(deadline); }
  Result<> append(const Key& key, ByteView value, const Deadline& deadline) override {
    return base_.append(full(key), value, deadline);
  }
  Result<std::vector<Bytes>> multi_get(const std::vector<Key>& keys, const Deadline& deadline) override {
    return base_.multi_get(full(keys), deadline);
  }
  Result<> multi_set(const std::vector<Key>& keys, const std::vector<Bytes>& values,
                     const Deadline& deadline) override {
    return base_.multi_set(full(keys), values, deadline);
  }
  Result<> queue_push(const Key& key, ByteView value, const Deadline& deadline) override {
    return base_.queue_push(full(key), value, deadline);
  }
  Result<Bytes> queue_pop(const Key& key, const Deadline& deadline) override {
    return base_.queue_pop(full(key), deadline);
  }
  Result<int64_t> queue_length(const Key& key, const Deadline& deadline) override {
    return base_.queue_length(full(key), deadline);
  }
  Result<std::vector<Key>> list_keys(std::string_view prefix, const Deadline& deadline) override {
    MUSTER_ASSIGN(std::vector<Key> keys, base_.list_keys(full(Key(prefix)), deadline));
    for (Key& key : keys) key.erase(0, prefix_.size() + 1);
    return keys;
  }
  Result<> barrier(const Key& key, int64_t count, const Deadline& deadline) override {
    return base_.barrier(full(key), count, deadline);
  }
  Result<std::unique_ptr<TtlLock>> claim(const Key& name, ByteView value, Duration time_to_live,
                                         const Deadline& deadline) override {
    return base_.claim(full(name), value, time_to_live, deadline);
  }
  Result<std::map<Key, Bytes>> claims(std::string_view prefix, const Deadline& deadline) override {
    MUSTER_ASSIGN(const auto found, base_.claims(full(Key(prefix)), deadline));
    std::map<Key, Bytes> result;
    for (const auto& [name, value] : found) result.emplace(name.substr(prefix_.size() + 1), value);
    return result;
  }
  Result<std::unique_ptr<Store>> clone() override {
    MUSTER_ASSIGN(std::unique_ptr<Store> base, base_.clone());
    return prefix_store(prefix_, std::move(base));
  }
  Result<StoreStat> stat(const Deadline& deadline) override { return base_.stat(deadline); }

 private:
  Key full(const Key& key) const {
    Key result = prefix_;
    result += '/';
    return result += key;
  }
  std::vector<Key> full(const std::vector<Key>& keys) const {
    std::vector<Key> result;
    result.reserve(keys.size());
    for (const Key& key : keys) result.push_back(full(key));
    return result;
  }

  std::string prefix_;
  Store& base_;
  std::unique_ptr<Store> owned_;
};

}  // namespace

std::unique_ptr<Store> prefix_store(std::string prefix, Store& base) {
  return std::make_unique<PrefixStore>(std::move(prefix), base, nullptr);
}

std::unique_ptr<Store> prefix_store(std::string prefix, std::unique_ptr<Store> base) {
  Store& borrowed = *base;
  return std::make_unique<PrefixStore>(std::move(prefix), borrowed, std::move(base));
}

}  // namespace muster
