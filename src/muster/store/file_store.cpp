#include <algorithm>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

#include "muster/base/random.h"
#include "muster/store/file_log.h"
#include "muster/store/request_store.h"

namespace muster {
namespace {

constexpr Duration kShortestLook = 1ms;
constexpr Duration kLongestLook = 50ms;

// How an operation meets the log.
enum class OperationClass {
  kLook,    // read the log, then ask the state; a wait is released by what is read later
  kAppend,  // becomes part of the log
  kTake,    // becomes part of the log once there is something to take
};

OperationClass way_of(StoreOperation operation) {
  switch (operation) {
    case StoreOperation::kGet:
    case StoreOperation::kMultiGet:
    case StoreOperation::kWait:
    case StoreOperation::kCheck:
    case StoreOperation::kNumKeys:
    case StoreOperation::kQueueLength:
    case StoreOperation::kListKeys:
    case StoreOperation::kStat:
      return OperationClass::kLook;
    case StoreOperation::kQueuePop:
      return OperationClass::kTake;
    default:
      return OperationClass::kAppend;
  }
}

// Every process keeps its own StoreState and brings it up to date from the log, so the state machine is the same as
// everywhere else. Waiting is polling: a call reads the log again after a pause that grows.
class FileStore : public RequestStore {
 public:
  FileStore(std::string path, std::unique_ptr<FileLog> log) : path_(std::move(path)), log_(std::move(log)) {
    fill_secure_random({reinterpret_cast<uint8_t*>(&self_), sizeof self_});
  }

  Result<std::unique_ptr<Store>> clone() override { return file_store(path_); }

 protected:
  Result<Reply> call(Request request, const Deadline& deadline) override {
    MUSTER_TRY(validate(request));
    Call call;
    {
      const std::lock_guard lock(mutex_);
      call.request = std::move(request);
      call.request.id = next_id_++;
      call.request.immediate = call.request.operation == StoreOperation::kQueuePop;
      calls_[call.request.id] = &call;
    }
    Result<> outcome = drive(call, deadline);
    const std::lock_guard lock(mutex_);
    calls_.erase(call.request.id);
    MUSTER_TRY(std::move(outcome));
    MUSTER_TRY(std::move(call.reply->status));
    return std::move(*call.reply);
  }

 private:
  struct Call {
    Request request;
    bool submitted = false;
    std::optional<Reply> reply;
  };

  Result<> drive(Call& call, const Deadline& deadline) {
    for (Duration pause = kShortestLook;; pause = std::min(pause * 2, kLongestLook)) {
      {
        const std::lock_guard lock(mutex_);
        MUSTER_ASSIGN(const bool busy, step(call));
        if (call.reply) return {};
        if (busy) pause = kShortestLook;  // another writer is done in no time
      }
      if (deadline.passed()) return give_up(call);
      // tidy: allow(sleep) a file tells nobody that it grew, over NFS least of all
      std::this_thread::sleep_for(std::min(pause, deadline.left()));
    }
  }

  // One attempt, under the mutex. Whatever is read from the log goes to the calls that it answers. True if another
  // writer was at it.
  Result<bool> step(Call& call) {
    const OperationClass way = way_of(call.request.operation);
    if (call.submitted || way == OperationClass::kLook) {
      MUSTER_TRY(log_->catch_up(apply()));
      if (!call.submitted) deliver(call.request, self_);
      call.submitted = true;
      return false;
    }
    const auto wanted = [&] { return way == OperationClass::kAppend || queue_holds_something(call.request.keys[0]); };
    MUSTER_ASSIGN(const auto outcome, log_->append(call.request, self_, apply(), wanted));
    call.submitted = outcome == FileLog::Outcome::kAppended;
    return outcome == FileLog::Outcome::kBusy;
  }

  // The time is up. An arrival at a barrier is on record and must be withdrawn, unless the barrier was released
  // meanwhile; other waits are known to this process only.
  Result<> give_up(Call& call) {
    const Request cancel{StoreOperation::kCancel, call.request.id};
    const bool on_record = call.submitted && call.request.operation == StoreOperation::kBarrier;
    const Deadline grace = Deadline::after(kCancelGrace);
    while (!grace.passed()) {
      {
        const std::lock_guard lock(mutex_);
        if (on_record) MUSTER_TRY(log_->append(cancel, self_, apply(), [&] { return !call.reply; }));
        if (!on_record) deliver(cancel, self_);
        if (call.reply && (call.reply->status || call.reply->status.error().code != ErrorCode::kAborted)) return {};
        if (call.reply || !on_record) break;
      }
      // tidy: allow(sleep) the other writer holds the lock for a moment
      std::this_thread::sleep_for(kShortestLook);
    }
    return tl::unexpected(timed_out(call.request, "the file store " + path_));
  }

  FileLog::Apply apply() {
    return [this](Request request, ClientId client) { deliver(std::move(request), client); };
  }

  bool queue_holds_something(const Key& key) {
    const Replies replies = state_.apply({StoreOperation::kQueueLength, 0, {key}}, self_);
    return replies.at(0).number > 0;
  }

  void deliver(Request request, ClientId client) {
    for (Reply& reply : state_.apply(std::move(request), client)) {
      if (reply.client != self_) continue;
      const auto found = calls_.find(reply.id);
      if (found != calls_.end()) found->second->reply = std::move(reply);
    }
  }

  const std::string path_;
  ClientId self_ = 0;  // this object's among all that append to the file
  std::mutex mutex_;
  std::unique_ptr<FileLog> log_;
  StoreState state_;
  RequestId next_id_ = 0;
  std::unordered_map<RequestId, Call*> calls_;
};

}  // namespace

Result<std::unique_ptr<Store>> file_store(const std::string& path) {
  MUSTER_ASSIGN(auto log, FileLog::open(path));
  return std::make_unique<FileStore>(path, std::move(log));
}

}  // namespace muster
