#include <algorithm>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

#include "muster/base/random.h"
#include "muster/store/external_store.h"
#include "muster/store/file_log.h"

namespace muster {
namespace {

constexpr Duration kMinPollPause = 1ms;
constexpr Duration kMaxPollPause = 50ms;

// Every process has its own StoreState and updates it from the log. A waiting call polls the log, with pauses that
// grow.
class FileStore : public Store {
 public:
  FileStore(std::string path, std::unique_ptr<FileLog> log) : path_(std::move(path)), log_(std::move(log)) {
    fill_secure_random({reinterpret_cast<uint8_t*>(&self_), sizeof self_});
  }

  Result<std::unique_ptr<Store>> clone() override { return file_store(path_); }

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
    const Result<> driven = drive(call, deadline);
    const std::lock_guard lock(mutex_);
    calls_.erase(call.request.id);
    MUSTER_TRY(driven);
    return outcome(std::move(call.reply), call.request, "the file store " + path_);
  }

 private:
  struct Call {
    Request request;
    bool submitted = false;
    std::optional<Reply> reply;
  };

  Result<> drive(Call& call, const Deadline& deadline) {
    for (Duration pause = kMinPollPause;; pause = std::min(pause * 5 / 4, kMaxPollPause)) {
      {
        const std::lock_guard lock(mutex_);
        MUSTER_ASSIGN(const bool busy, step(call));
        if (call.reply) return {};
        if (busy) pause = kMinPollPause;  // the other writer will finish soon
      }
      if (deadline.passed()) return cancel(call);
      // tidy: allow(sleep) no notification of a growing file works over NFS
      std::this_thread::sleep_for(std::min(pause, deadline.left()));
    }
  }

  // Makes one attempt to carry out the call. The caller holds the mutex. Requests that are read from the log may answer
  // any call of this process. True if another writer held the file's lock.
  Result<bool> step(Call& call) {
    if (call.submitted || has(call.request.operation, kReadOnly)) {
      MUSTER_TRY(log_->catch_up(apply()));
      if (!call.submitted) deliver(call.request, self_);
      call.submitted = true;
      return false;
    }
    const bool pops = call.request.operation == StoreOperation::kQueuePop;
    const auto wanted = [&] {
      return !pops || state_.apply({StoreOperation::kQueueLength, 0, call.request.keys}, self_).at(0).number > 0;
    };
    MUSTER_ASSIGN(const auto outcome, log_->append(call.request, self_, apply(), wanted));
    call.submitted = outcome == FileLog::Outcome::kAppended;
    return outcome == FileLog::Outcome::kBusy;
  }

  // Ends a call after its deadline. An arrival at a barrier is in the log, so a cancel is appended to the log, unless
  // the barrier has released the arrival. All other waits exist only in this process.
  Result<> cancel(Call& call) {
    const Request cancel{StoreOperation::kCancel, call.request.id};
    const bool on_record = call.submitted && call.request.operation == StoreOperation::kBarrier;
    for (const Deadline grace = Deadline::after(kCancelGrace); !grace.passed();) {
      {
        const std::lock_guard lock(mutex_);
        if (on_record) MUSTER_TRY(log_->append(cancel, self_, apply(), [&] { return !call.reply; }));
        if (!on_record) deliver(cancel, self_);
        if (call.reply || !on_record) return {};
      }
      // tidy: allow(sleep) the other writer holds the lock for a short time
      std::this_thread::sleep_for(kMinPollPause);
    }
    return {};
  }

  FileLog::Apply apply() {
    return [this](Request request, ClientId client) { deliver(std::move(request), client); };
  }

  void deliver(Request request, ClientId client) {
    for (Reply& reply : state_.apply(std::move(request), client)) {
      if (reply.client != self_) continue;
      const auto found = calls_.find(reply.id);
      if (found != calls_.end()) found->second->reply = std::move(reply);
    }
  }

  const std::string path_;
  ClientId self_ = 0;  // this object's client number; random, because many processes may append to the file
  std::mutex mutex_;   // guards all members below
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
