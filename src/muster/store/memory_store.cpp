#include <condition_variable>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "muster/store/request_store.h"
#include "muster/store/ttl_lock.h"

namespace muster {
namespace {

// The TTL locks of one memory store. MemoryClaim objects share it, because a lock may outlive the store.
struct Claims {
  std::mutex mutex;  // guards `held`
  std::map<Key, Bytes> held;
};

class MemoryClaim : public TtlLock {
 public:
  MemoryClaim(std::shared_ptr<Claims> claims, Key name) : claims_(std::move(claims)), name_(std::move(name)) {}
  ~MemoryClaim() override {
    const std::lock_guard lock(claims_->mutex);
    claims_->held.erase(name_);
  }
  bool held() const override { return true; }

 private:
  std::shared_ptr<Claims> claims_;
  const Key name_;
};

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
    if (!call.reply->status && call.reply->status.error().code == ErrorCode::kAborted) {
      return tl::unexpected(timed_out(waiting, "the memory store"));
    }
    MUSTER_TRY(std::move(call.reply->status));
    return std::move(*call.reply);
  }

  const std::shared_ptr<Claims>& claims() const { return claims_; }

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

  std::mutex mutex_;  // guards all members below, except claims_, which has its own mutex
  StoreState state_;
  RequestId next_id_ = 0;
  std::unordered_map<RequestId, Call*> calls_;
  std::shared_ptr<Claims> claims_ = std::make_shared<Claims>();
};

class MemoryStore : public RequestStore {
 public:
  explicit MemoryStore(std::shared_ptr<SharedMemory> memory) : memory_(std::move(memory)) {}
  Result<std::unique_ptr<Store>> clone() override { return std::make_unique<MemoryStore>(memory_); }
  Result<std::unique_ptr<TtlLock>> claim(const Key& name, ByteView value, Duration, const Deadline&) override {
    Claims& claims = *memory_->claims();
    const std::lock_guard lock(claims.mutex);
    if (!claims.held.emplace(name, Bytes(value.begin(), value.end())).second) {
      return lock_is_held(name);
    }
    return std::make_unique<MemoryClaim>(memory_->claims(), name);
  }
  Result<std::map<Key, Bytes>> claims(std::string_view prefix, const Deadline&) override {
    Claims& claims = *memory_->claims();
    const std::lock_guard lock(claims.mutex);
    std::map<Key, Bytes> found;
    for (const auto& [name, value] : claims.held) {
      if (name.starts_with(prefix)) found.emplace(name, value);
    }
    return found;
  }

 protected:
  Result<Reply> call(Request request, const Deadline& deadline) override {
    return memory_->call(std::move(request), deadline);
  }

 private:
  std::shared_ptr<SharedMemory> memory_;  // shared, because it lives as long as the last clone
};

}  // namespace

std::unique_ptr<Store> memory_store() { return std::make_unique<MemoryStore>(std::make_shared<SharedMemory>()); }

}  // namespace muster
