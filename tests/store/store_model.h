#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>

#include "muster/store/state/state.h"

namespace muster {

/// What the store's operations mean, one at a time and as plainly as can be said: the definition that histories and
/// random requests are compared with. It shares no code with StoreState. Barriers are not in it: they mean something
/// only between clients. A copy is a snapshot.
class StoreModel {
 public:
  /// Carries out the request, or gives nothing, and changes nothing, when it would have to wait.
  std::optional<Reply> apply(const Request& request);
  /// The same text for the same content.
  std::string fingerprint() const;
  size_t num_keys() const { return data_.size(); }

 private:
  bool present(const Request& request) const;
  bool visible(const Key& key) const { return data_.contains(key) || queues_.contains(key); }
  Result<> add(const Request& request, Reply& reply);
  void compare_set(const Request& request, Reply& reply);
  void pop(const Request& request, Reply& reply);
  Bytes value_or_empty(const Key& key) const;

  std::map<Key, Bytes> data_;
  std::map<Key, std::deque<Bytes>> queues_;  // never an empty one
};

/// Whether a client that saw `seen` may have been answered `expected`: what the operation returns is the same.
bool same_answer(const Request& request, const Reply& expected, const Reply& seen);
/// Whether the operation may change the store.
bool changes(StoreOperation operation);

}  // namespace muster
