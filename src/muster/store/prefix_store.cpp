#include "muster/store/state/state.h"
#include "muster/store/ttl_lock.h"

namespace muster {
namespace {

class PrefixStore : public Store {
 public:
  PrefixStore(const std::string& prefix, Store& base, std::unique_ptr<Store> owned = nullptr)
      : name_(prefix), prefix_(prefix + '/'), base_(base), owned_(std::move(owned)) {}

  // A num_keys() without keys counts the keys of the whole store, as torch's PrefixStore does.
  Result<Reply> call(Request request, const Deadline& deadline) override {
    for (Key& key : request.keys) key.insert(0, prefix_);
    const bool lists = request.operation == StoreOperation::kListKeys;
    Result<Reply> reply = base_.call(std::move(request), deadline);
    if (!reply || !lists) return reply;
    for (Key& key : reply->keys) key.erase(0, prefix_.size());
    return reply;
  }
  Result<std::unique_ptr<TtlLock>> claim(const Key& name, ByteView value, Duration time_to_live,
                                         const Deadline& deadline) override {
    return base_.claim(prefix_ + name, value, time_to_live, deadline);
  }
  Result<std::map<Key, Bytes>> claims(std::string_view prefix, const Deadline& deadline) override {
    MUSTER_ASSIGN(const auto found, base_.claims(prefix_ + Key(prefix), deadline));
    std::map<Key, Bytes> result;
    for (const auto& [name, value] : found) result.emplace(name.substr(prefix_.size()), value);
    return result;
  }
  std::optional<HostPort> address() const override { return base_.address(); }
  Result<std::unique_ptr<Store>> clone() override {
    MUSTER_ASSIGN(std::unique_ptr<Store> base, base_.clone());
    return prefix_store(name_, std::move(base));
  }

 private:
  const std::string name_, prefix_;  // "prefix" and "prefix/"
  Store& base_;
  const std::unique_ptr<Store> owned_;
};

}  // namespace

std::unique_ptr<Store> prefix_store(std::string prefix, Store& base) {
  return std::make_unique<PrefixStore>(prefix, base);
}

std::unique_ptr<Store> prefix_store(std::string prefix, std::unique_ptr<Store> base) {
  Store& borrowed = *base;
  return std::make_unique<PrefixStore>(prefix, borrowed, std::move(base));
}

}  // namespace muster
