#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "muster/store/store.h"
#include "muster/torch/exception.h"

namespace muster {

/// The class of c10d_over_store(). In Python it is muster._C.Store.
class C10dStoreAdapter final : public c10d::Store {
 public:
  explicit C10dStoreAdapter(std::unique_ptr<muster::Store> store) : store_(std::move(store)) {}

  /// The host and port of the server, if it has them.
  std::optional<HostPort> address() const { return store_->address(); }

  c10::intrusive_ptr<c10d::Store> clone() override {
    auto copy = c10::make_intrusive<C10dStoreAdapter>(store_value(store_->clone()));
    copy->setTimeout(timeout_);
    return copy;
  }

  using c10d::Store::set;
  void set(const Key& key, const Bytes& value) override { store_value(store_->set(key, value, deadline())); }
  using c10d::Store::compareSet;
  Bytes compareSet(const Key& key, const Bytes& expected, const Bytes& desired) override {
    return store_value(store_->compare_set(key, expected, desired, deadline()));
  }
  Bytes get(const Key& key) override { return store_value(store_->get(key, deadline())); }
  int64_t add(const Key& key, int64_t value) override { return store_value(store_->add(key, value, deadline())); }
  bool deleteKey(const Key& key) override { return store_value(store_->delete_key(key, deadline())); }
  bool check(const std::vector<Key>& keys) override { return store_value(store_->check(keys, deadline())); }
  int64_t getNumKeys() override { return store_value(store_->num_keys(deadline())); }
  void wait(const std::vector<Key>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<Key>& keys, const std::chrono::milliseconds& timeout) override {
    store_value(store_->wait(keys, Deadline::after(timeout)));
  }
  void append(const Key& key, const Bytes& value) override { store_value(store_->append(key, value, deadline())); }
  std::vector<Bytes> multiGet(const std::vector<Key>& keys) override {
    return store_value(store_->multi_get(keys, deadline()));
  }
  void multiSet(const std::vector<Key>& keys, const std::vector<Bytes>& values) override {
    store_value(store_->multi_set(keys, values, deadline()));
  }
  bool hasExtendedApi() const override { return true; }
  void queuePush(const Key& key, const Bytes& value) override {
    store_value(store_->queue_push(key, value, deadline()));
  }
  Bytes queuePop(const Key& key, bool block) override {
    if (block) return store_value(store_->queue_pop(key, deadline()));
    // Another process may take the element between the two calls. Then this waits up to 100 ms instead of not at all.
    if (queueLen(key) > 0) {
      Result<Bytes> value = store_->queue_pop(key, Deadline::after(std::min(timeout_, std::chrono::milliseconds(100))));
      if (value || value.error().code != ErrorCode::kTimeout) return store_value(std::move(value));
    }
    throw c10::DistQueueEmptyError("the queue \"" + key + "\" is empty");
  }
  int64_t queueLen(const Key& key) override { return store_value(store_->queue_length(key, deadline())); }

  // Not virtual in every version of torch, hence no `override`.
#ifdef __clang__
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Winconsistent-missing-override"
#endif
  std::vector<Key> listKeys() { return store_value(store_->list_keys("", deadline())); }
  void barrier(const Key& key, int64_t world_size, const std::chrono::milliseconds& timeout) {
    store_value(store_->barrier(key, world_size, Deadline::after(timeout)));
  }
#ifdef __clang__
#pragma clang diagnostic pop
#endif

 private:
  template <class T>
  static T store_value(Result<T> result) {
    if (!result) {
      const Error& error = result.error();
      switch (error.code) {
        case ErrorCode::kPeerLost:
        case ErrorCode::kUnavailable:
          throw c10::DistNetworkError(error.to_string());
        case ErrorCode::kInvalidArgument:
        case ErrorCode::kUnsupported:
          throw_error(error);
        default:
          throw c10::DistStoreError(error.to_string());
      }
    }
    if constexpr (!std::is_void_v<T>) return std::move(*result);
  }
  Deadline deadline() const { return Deadline::after(timeout_); }

  std::unique_ptr<muster::Store> store_;
};

}  // namespace muster
