#include <condition_variable>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "muster/store/state/state.h"
#include "muster/store/ttl_lock.h"

namespace muster {
namespace {

// The state that all clones of one memory store share. Each call waits on its own condition variable, so a release
// wakes only the calls that it ends.
class SharedMemory {
 public:
  Result<Reply> call(Request request, const Deadline& deadline) {
    std::unique_lock lock(mutex_);
    const RequestId id = request.id = next_id_++;
    Call call;
    calls_[id] = &call;
    const Request waiting{request.operation, id, request.keys};
    deliver(state_.apply(std::move(request), kClient));
    while (!call.reply && !deadline.passed()) call.ready.wait_for(lock, deadline.left());
    if (!call.reply) deliver(state_.apply({StoreOperation::kCancel, id}, kClient));
    calls_.erase(id);
    return outcome(std::move(call.reply), waiting, "the memory store");
  }

  bool lock(const Key& name, ByteView value) {
    const std::lock_guard lock(mutex_);
    return locks_.emplace(name, Bytes(value.begin(), value.end())).second;
  }
  void unlock(const Key& name) {
    const std::lock_guard lock(mutex_);
    locks_.erase(name);
  }
  std::map<Key, Bytes> locks(std::string_view prefix) {
    const std::lock_guard lock(mutex_);
    std::map<Key, Bytes> found = locks_;
    std::erase_if(found, [&](const auto& entry) { return !entry.first.starts_with(prefix); });
    return found;
  }

 private:
  static constexpr ClientId kClient = 0;
  struct Call {
    std::condition_variable ready;
    std::optional<Reply> reply;
  };

  void deliver(Replies replies) {
    for (Reply& reply : replies) {
      Call& call = *calls_.at(reply.id);
      call.reply = std::move(reply);
      call.ready.notify_one();
    }
  }

  std::mutex mutex_;  // guards all members below
  StoreState state_;
  RequestId next_id_ = 0;
  std::unordered_map<RequestId, Call*> calls_;
  std::map<Key, Bytes> locks_;
};

class MemoryLock : public TtlLock {
 public:
  MemoryLock(std::shared_ptr<SharedMemory> memory, Key name) : memory_(std::move(memory)), name_(std::move(name)) {}
  ~MemoryLock() override { memory_->unlock(name_); }
  bool held() const override { return true; }

 private:
  const std::shared_ptr<SharedMemory> memory_;  // shared, because a lock may outlive the store
  const Key name_;
};

class MemoryStore : public Store {
 public:
  explicit MemoryStore(std::shared_ptr<SharedMemory> memory) : memory_(std::move(memory)) {}
  Result<std::unique_ptr<Store>> clone() override { return std::make_unique<MemoryStore>(memory_); }
  Result<std::unique_ptr<TtlLock>> claim(const Key& name, ByteView value, Duration, const Deadline&) override {
    if (!memory_->lock(name, value)) return lock_is_held(name);
    return std::make_unique<MemoryLock>(memory_, name);
  }
  Result<std::map<Key, Bytes>> claims(std::string_view prefix, const Deadline&) override {
    return memory_->locks(prefix);
  }
  Result<Reply> call(Request request, const Deadline& deadline) override {
    return memory_->call(std::move(request), deadline);
  }

 private:
  std::shared_ptr<SharedMemory> memory_;  // shared, because it lives as long as the last clone
};

}  // namespace

std::unique_ptr<Store> memory_store() { return std::make_unique<MemoryStore>(std::make_shared<SharedMemory>()); }

}  // namespace muster
