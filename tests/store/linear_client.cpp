#include "store/linear_client.h"

#include <sys/socket.h>

#include "muster/store/connect.h"
#include "muster/store/external_store.h"
#include "muster/store/protocol/messages.h"
#include "store/store_model.h"
#include "store/torch_client.h"

namespace muster {
namespace {

class StoreClient : public RecordedClient {
 public:
  StoreClient(std::unique_ptr<Store> store, bool certain) : store_(std::move(store)), certain_(certain) {}

  Request adapt(Request request) const override {
    if (request.operation == StoreOperation::kNumKeys) request.keys.clear();
    return request;
  }

  CallOutcome call(const Request& request, const Deadline& deadline) override {
    Reply reply{0, request.id};
    reply.status = carry_out(request, deadline, reply);
    if (reply.status) return {CallOutcome::What::kAnswer, std::move(reply)};
    const ErrorCode code = reply.status.error().code;
    const bool lost = code == ErrorCode::kPeerLost;
    const bool barrier = request.operation == StoreOperation::kBarrier;
    // Without the server's answer to its cancellation, a client does not know whether the request was carried out.
    const bool no_reply = steady_clock().now() >= deadline.when() + kCancelGrace;
    const bool no_effect = certain_ && !no_reply && (request.operation == StoreOperation::kQueuePop || barrier);
    if (code == ErrorCode::kTimeout && (no_effect || (!barrier && !changes(request.operation)))) {
      return {CallOutcome::What::kNothing};
    }
    if (lost || code == ErrorCode::kTimeout) return {CallOutcome::What::kUnknown, {}, lost};
    return {CallOutcome::What::kAnswer, std::move(reply)};
  }

 private:
  template <class T, class Member>
  static Result<> take(Result<T> result, Member& member) {
    MUSTER_TRY(std::move(result).map([&](T value) { member = static_cast<Member>(std::move(value)); }));
    return {};
  }

  Result<> carry_out(const Request& request, const Deadline& deadline, Reply& reply) {
    const auto one = [&](Result<Bytes> value) {
      return std::move(value).map([&](Bytes bytes) { reply.values = {std::move(bytes)}; });
    };
    const auto key = [&]() -> const Key& { return request.keys[0]; };
    const auto value = [&](size_t i) -> ByteView { return request.values[i]; };
    switch (request.operation) {
      case StoreOperation::kSet:
        return store_->set(key(), value(0), deadline);
      case StoreOperation::kGet:
        return one(store_->get(key(), deadline));
      case StoreOperation::kCompareSet:
        return one(store_->compare_set(key(), value(0), value(1), deadline));
      case StoreOperation::kAdd:
        return take(store_->add(key(), request.number, deadline), reply.number);
      case StoreOperation::kCheck:
        return take(store_->check(request.keys, deadline), reply.number);
      case StoreOperation::kWait:
        return store_->wait(request.keys, deadline);
      case StoreOperation::kDelete:
        return take(store_->delete_key(key(), deadline), reply.number);
      case StoreOperation::kNumKeys:
        return take(store_->num_keys(deadline), reply.number);
      case StoreOperation::kAppend:
        return store_->append(key(), value(0), deadline);
      case StoreOperation::kMultiGet:
        return take(store_->multi_get(request.keys, deadline), reply.values);
      case StoreOperation::kMultiSet:
        return store_->multi_set(request.keys, request.values, deadline);
      case StoreOperation::kQueuePush:
        return store_->queue_push(key(), value(0), deadline);
      case StoreOperation::kQueuePop:
        return one(store_->queue_pop(key(), deadline));
      case StoreOperation::kQueueLength:
        return take(store_->queue_length(key(), deadline), reply.number);
      case StoreOperation::kListKeys:
        return take(store_->list_keys(key(), deadline), reply.keys);
      case StoreOperation::kBarrier:
        return store_->barrier(key(), request.number, deadline);
      default:
        return fail(ErrorCode::kUnsupported, "not an operation of stores");
    }
  }

  std::unique_ptr<Store> store_;
  bool certain_;
};

class TorchRecorded : public RecordedClient {
 public:
  explicit TorchRecorded(const Address& address) : client_(address) {}
  bool connected() const { return client_.connected(); }

  Request adapt(Request request) const override {
    const StoreOperation operation = request.operation;
    request.immediate = operation == StoreOperation::kGet || operation == StoreOperation::kMultiGet ||
                        operation == StoreOperation::kQueuePop;
    if (operation == StoreOperation::kNumKeys) request.keys.clear();
    if (operation == StoreOperation::kListKeys) request.keys = {Key()};
    return request;
  }

  CallOutcome call(const Request& request, const Deadline& deadline) override {
    auto outcome = client_.call(request, deadline);
    if (outcome.reply) return {CallOutcome::What::kAnswer, std::move(*outcome.reply)};
    // The server drops a release that crosses the withdrawal, so the client does not know whether it was released.
    if (outcome.withdrawn && request.operation == StoreOperation::kBarrier) return {};
    if (outcome.withdrawn) return {CallOutcome::What::kNothing};
    return {CallOutcome::What::kUnknown, {}, true};
  }

 private:
  TorchClient client_;
};

}  // namespace

std::unique_ptr<RecordedClient> recorded(std::unique_ptr<Store> store, bool certain) {
  return std::make_unique<StoreClient>(std::move(store), certain);
}

std::unique_ptr<RecordedClient> recorded_torch(const Address& address) {
  auto client = std::make_unique<TorchRecorded>(address);
  if (!client->connected()) return nullptr;
  return client;
}

void send_and_die(const std::string& url, ByteView secret, const Request& request) {
  const auto connection =
      connect_to_store(url, {Bytes(secret.begin(), secret.end()), nullptr}, Deadline::after(std::chrono::seconds(10)));
  if (!connection) return;
  const Bytes frame = *encode_request(request);
  (void)!send(connection->stream->fd(), frame.data(), frame.size(), MSG_NOSIGNAL);
}

}  // namespace muster
