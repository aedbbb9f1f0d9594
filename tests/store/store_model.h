#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>

#include "muster/store/state/state.h"

namespace muster {

/// A simple reference model of the store, for one operation at a time. Tests compare histories with it. It shares no
/// code with StoreState. It has no barriers, because a barrier involves several clients. A copy is a snapshot.
class StoreModel {
 public:
  /// Carries out the request. If the request would have to wait, returns nothing and changes nothing.
  std::optional<Reply> apply(const Request& request);
  /// A text that is the same if and only if the content is the same.
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
  std::map<Key, std::deque<Bytes>> queues_;  // never holds an empty queue
};

/// True if `seen` and `expected` are the same answer. Compares only what the operation returns.
bool same_answer(const Request& request, const Reply& expected, const Reply& seen);
/// True if the operation may change the store.
bool changes(StoreOperation operation);

}  // namespace muster
