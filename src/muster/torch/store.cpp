#include "muster/torch/store.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/exception.h>

#include "muster/store/state/state.h"
#include "muster/torch/c10d/store_adapter.h"
#include "muster/torch/exception.h"

namespace muster {
namespace {

using std::chrono::milliseconds;

/// A template, so that it also compiles with a torch whose stores cannot list their keys.
template <class C10dStore>
std::vector<Key> all_keys(C10dStore& store) {
  if constexpr (requires { store.listKeys(); }) {
    return store.listKeys();
  } else {
    C10_THROW_ERROR(NotImplementedError, "this version of torch cannot list the keys of a store");
  }
}

/// Runs `call`. Its exceptions become Errors.
template <class Call>
auto guarded(const Deadline& deadline, Call call) -> Result<decltype(call())> {
  const auto failed = [](ErrorCode code, const c10::Error& error) {
    return fail(code, std::string("torch's store: ") + error.what_without_backtrace());
  };
  // c10d has no exception type for a timed out wait, and some of its stores give up just before the deadline.
  const auto timed_out = [&](const c10::Error& error) {
    return deadline.passed() || error.msg().find("imeout") != std::string::npos;
  };
  try {
    return call();
  } catch (const c10d::TimeoutError& error) {
    return failed(ErrorCode::kTimeout, error);
  } catch (const c10::DistNetworkError& error) {
    return failed(ErrorCode::kPeerLost, error);
  } catch (const c10::DistStoreError& error) {
    return failed(timed_out(error) ? ErrorCode::kTimeout : ErrorCode::kIo, error);
  } catch (const c10::ValueError& error) {
    return failed(ErrorCode::kInvalidArgument, error);
  } catch (const c10::NotImplementedError& error) {
    return failed(ErrorCode::kUnsupported, error);
  } catch (const c10::Error& error) {
    return failed(timed_out(error) ? ErrorCode::kTimeout : ErrorCode::kInternal, error);
  } catch (const std::exception& error) {
    return fail(ErrorCode::kInternal, std::string("torch's store: ") + error.what());
  }
}

class MusterStoreAdapter final : public muster::Store {
 public:
  explicit MusterStoreAdapter(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  Result<Reply> call(Request request, const Deadline& deadline) override {
    if (request.operation == StoreOperation::kQueuePop) return pop(request.keys[0], deadline);
    if (request.operation == StoreOperation::kBarrier) return arrive(request.keys[0], request.number, deadline);
    if (request.operation == StoreOperation::kStat) {
      return fail(ErrorCode::kUnsupported, "this store keeps no statistics; ask the store of a running job");
    }
    return guarded(deadline, [&] { return carry_out(request, deadline); });
  }
  Result<std::unique_ptr<muster::Store>> clone() override {
    return guarded(Deadline::after(store_->getTimeout()), [&] { return store_over_c10d(store_->clone()); });
  }

 private:
  Reply carry_out(const Request& request, const Deadline& deadline);
  Result<Reply> pop(const Key& key, const Deadline& deadline);
  Result<Reply> arrive(const Key& key, int64_t count, const Deadline& deadline);

  /// At least 1 ms, because 0 means forever to c10d.
  static milliseconds left(const Deadline& deadline) { return milliseconds(std::max(1, deadline.poll_timeout_ms())); }

  c10::intrusive_ptr<c10d::Store> store_;
};

// Throws what the c10d store throws.
Reply MusterStoreAdapter::carry_out(const Request& request, const Deadline& deadline) {
  const std::vector<Key>& keys = request.keys;
  const std::vector<Bytes>& values = request.values;
  Reply reply;
  switch (request.operation) {
    case StoreOperation::kSet:
      store_->set(keys[0], values[0]);
      break;
    case StoreOperation::kGet:
      store_->wait(keys, left(deadline));  // get() alone would wait for the store's own timeout
      reply.values = {store_->get(keys[0])};
      break;
    case StoreOperation::kCompareSet:
      reply.values = {store_->compareSet(keys[0], values[0], values[1])};
      break;
    case StoreOperation::kAdd:
      reply.number = store_->add(keys[0], request.number);
      break;
    case StoreOperation::kCheck:
      reply.number = store_->check(keys);
      break;
    case StoreOperation::kWait:
      store_->wait(keys, left(deadline));
      break;
    case StoreOperation::kDelete:
      reply.number = store_->deleteKey(keys[0]);
      break;
    case StoreOperation::kNumKeys:
      reply.number = store_->getNumKeys();
      break;
    case StoreOperation::kAppend:
      store_->append(keys[0], values[0]);
      break;
    case StoreOperation::kMultiGet:
      store_->wait(keys, left(deadline));
      reply.values = store_->multiGet(keys);
      break;
    case StoreOperation::kMultiSet:
      store_->multiSet(keys, values);
      break;
    case StoreOperation::kQueuePush:
      store_->queuePush(keys[0], values[0]);
      break;
    case StoreOperation::kQueueLength:
      reply.number = store_->queueLen(keys[0]);
      break;
    case StoreOperation::kListKeys:
      reply.keys = all_keys(*store_);
      std::erase_if(reply.keys, [&](const Key& key) { return !key.starts_with(keys[0]); });
      break;
    default:
      C10_THROW_ERROR(NotImplementedError, c10::str("c10d has no ", name(request.operation)));
  }
  return reply;
}

Result<Reply> MusterStoreAdapter::pop(const Key& key, const Deadline& deadline) {
  // Polls, because c10d's blocking pop is bounded only by the timeout that all users of the store share.
  for (milliseconds pause(1);; pause = std::min(2 * pause, milliseconds(50))) {
    auto value = guarded(deadline, [&]() -> std::optional<Bytes> {
      try {
        return store_->queuePop(key, /*block=*/false);
      } catch (const c10::DistQueueEmptyError&) {
        return std::nullopt;
      }
    });
    if (!value) return tl::unexpected(value.error());
    if (*value) return Reply{.values = {std::move(**value)}};
    if (deadline.passed())
      return fail(ErrorCode::kTimeout, "timed out waiting for an element of the queue \"" + key + "\"");
    // tidy: allow(sleep) c10d offers nothing to wait on
    std::this_thread::sleep_for(std::min(pause, left(deadline)));
  }
}

Result<Reply> MusterStoreAdapter::arrive(const Key& key, int64_t count, const Deadline& deadline) {
  if (count < 1) return fail(ErrorCode::kInvalidArgument, "a barrier needs at least one caller");
  // c10d's own barrier never resets its counter: a second round on the same key would not wait.
  MUSTER_ASSIGN(const int64_t arrived, add(key, 1, deadline));
  const Key round = key + "/round/" + std::to_string((arrived - 1) / count);
  MUSTER_TRY(arrived % count == 0 ? set(round, as_bytes("done"), deadline) : wait({round}, deadline));
  return Reply{};
}

}  // namespace

c10::intrusive_ptr<c10d::Store> c10d_over_store(std::unique_ptr<Store> store) {
  return c10::make_intrusive<C10dStoreAdapter>(std::move(store));
}

std::unique_ptr<Store> store_over_c10d(c10::intrusive_ptr<c10d::Store> store) {
  return std::make_unique<MusterStoreAdapter>(std::move(store));
}

}  // namespace muster
