// Sends random requests of several clients, as bytes of both protocols, to a store with one shard and to a store with
// four. All replies are compared with those of a simple model, which keeps waiters in a list. Four bytes of input make
// one request: client, operation, keys, value.
#include <algorithm>
#include <deque>

#include "muster/base/check.h"
#include "muster/store/protocol/messages.h"
#include "muster/store/protocol/protocol.h"
#include "store/store_model.h"
#include "store/torch_client.h"

namespace muster {
namespace {

struct PendingRequest {
  Request request;
  ClientId client;
};

// The model: finds the expected replies by a search through all waiters.
class PlainStore {
 public:
  Replies apply(const Request& request, ClientId client) {
    Replies replies;
    if (request.operation == StoreOperation::kCancel) {
      cancel(request.id, client, replies);
    } else if (request.operation == StoreOperation::kBarrier) {
      arrive(request, client, replies);
    } else if (!answer({request, client}, replies)) {
      waiting_.push_back({request, client});
    } else if (request.operation == StoreOperation::kQueuePush) {
      release_one(request.keys[0], replies);
    } else if (changes(request.operation)) {
      release_all(replies);
    }
    return replies;
  }

  void drop(ClientId client) {
    std::erase_if(waiting_, [&](const PendingRequest& pending) { return pending.client == client; });
  }
  size_t waiters() const { return waiting_.size(); }

 private:
  bool answer(const PendingRequest& pending, Replies& replies) {
    auto reply = model_.apply(pending.request);
    if (!reply) return false;
    reply->client = pending.client;
    replies.push_back(std::move(*reply));
    return true;
  }

  void cancel(RequestId id, ClientId client, Replies& replies) {
    const auto gone = [&](const PendingRequest& pending) {
      return pending.client == client && pending.request.id == id;
    };
    if (std::erase_if(waiting_, gone) > 0) replies.push_back({client, id, fail(ErrorCode::kAborted, "cancelled")});
  }

  void arrive(const Request& request, ClientId client, Replies& replies) {
    const auto same = [&](const PendingRequest& pending) {
      return pending.request.operation == StoreOperation::kBarrier && pending.request.keys == request.keys;
    };
    const auto other = std::find_if(waiting_.begin(), waiting_.end(), same);
    if (request.number < 1) {
      return replies.push_back({client, request.id, fail(ErrorCode::kInvalidArgument, "count")});
    }
    if (other != waiting_.end() && other->request.number != request.number) {
      return replies.push_back({client, request.id, fail(ErrorCode::kMismatch, "count")});
    }
    waiting_.push_back({request, client});
    if (std::count_if(waiting_.begin(), waiting_.end(), same) < request.number) return;
    for (const PendingRequest& pending : waiting_) {
      if (same(pending)) replies.push_back({pending.client, pending.request.id});
    }
    std::erase_if(waiting_, same);
  }

  void release_all(Replies& replies) {
    std::erase_if(waiting_, [&](const PendingRequest& pending) {
      const StoreOperation operation = pending.request.operation;
      if (pending.request.keys[0].starts_with('q')) return false;
      return operation != StoreOperation::kBarrier && operation != StoreOperation::kQueuePop &&
             answer(pending, replies);
    });
  }

  // A push releases one waiter: a pop, or else the oldest wait.
  void release_one(const Key& key, Replies& replies) {
    for (const StoreOperation operation : {StoreOperation::kQueuePop, StoreOperation::kWait}) {
      for (auto it = waiting_.begin(); it != waiting_.end(); ++it) {
        const auto& keys = it->request.keys;
        if (it->request.operation != operation || std::find(keys.begin(), keys.end(), key) == keys.end()) continue;
        if (!answer(*it, replies)) continue;
        waiting_.erase(it);
        return;
      }
    }
  }

  StoreModel model_;
  std::deque<PendingRequest> waiting_;
};

// True if the replies are the same in any order, with their keys in any order.
bool same(Replies a, Replies b, const Request& request) {
  if (a.size() != b.size()) return false;
  const auto order = [](const Reply& x, const Reply& y) {
    return std::pair(x.client, x.id) < std::pair(y.client, y.id);
  };
  std::sort(a.begin(), a.end(), order);
  std::sort(b.begin(), b.end(), order);
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].client != b[i].client || a[i].id != b[i].id) return false;
    if (a[i].status.has_value() != b[i].status.has_value()) return false;
    if (!a[i].status && a[i].status.error().code != b[i].status.error().code) return false;
    for (Reply* reply : {&a[i], &b[i]}) std::sort(reply->keys.begin(), reply->keys.end());
    if (a[i].values != b[i].values || a[i].keys != b[i].keys) return false;
    if (request.operation != StoreOperation::kBarrier && a[i].number != b[i].number) return false;
  }
  return true;
}

struct Client {
  explicit Client(bool torch) : protocol(torch ? torch_protocol() : muster_protocol()), torch(torch) {
    if (torch) protocol->feed(torch_hello());
  }
  std::unique_ptr<Protocol> protocol;
  bool torch;
  RequestId last_id = 0;
};

class RandomClients {
 public:
  void run(ByteView input) {
    for (; input.size() >= 4; input = input.subspan(4)) {
      const ClientId number = input[0] % 4;
      if (input[0] >= 250) {
        leave(number);
        continue;
      }
      Request request = make(input);
      Client& client = clients_[number];
      if (client.torch &&
          (request.operation == StoreOperation::kStat || request.operation == StoreOperation::kCancel)) {
        client.protocol->feed(Bytes{kTorchCancelWait});
      } else if (client.torch) {
        if (const auto bytes = torch_request(request)) client.protocol->feed(*bytes);
      } else {
        if (request.operation != StoreOperation::kCancel) request.id = ++client.last_id;
        client.protocol->feed(*encode_request(request));
      }
      compare_replies(client, number);
    }
    for (ClientId number = 0; number < 4; ++number) leave(number);
    MUSTER_CHECK(single_.waiters() == 0 && sharded_.waiters() == 0, "a request of a removed client still waits");
  }

 private:
  // Queues use separate keys. A push releases only one waiter. So it would depend on the order of checks whether a wait
  // for an existing queue and other keys is released.
  static constexpr const char* kQueues[] = {"q", "qq"};

  static Request make(ByteView input) {
    Request request;
    request.operation = static_cast<StoreOperation>(1 + input[1] % 17);
    request.immediate = input[1] >= 128 && request.operation != StoreOperation::kWait;
    static const Key kKeys[] = {"a", "b", "c", "", "ab"};
    const Key key = kKeys[input[2] % 5], queue = kQueues[input[2] % 2];
    const auto value = [&](uint8_t salt) {
      return to_bytes(input[3] % 3 == 0 ? "" : std::to_string(input[3] % 7 + salt));
    };
    switch (request.operation) {
      case StoreOperation::kWait:
        if (input[3] % 2 == 0) {
          request.keys = {queue};
          break;
        }
        [[fallthrough]];
      case StoreOperation::kCheck:
      case StoreOperation::kMultiGet:
      case StoreOperation::kMultiSet:
        for (size_t i = 0; i < 5; ++i) {
          if ((input[2] >> i & 1) != 0) request.keys.push_back(kKeys[i]);
        }
        break;
      case StoreOperation::kNumKeys:
        break;
      case StoreOperation::kQueuePush:
      case StoreOperation::kQueuePop:
      case StoreOperation::kQueueLength:
        request.keys = {queue};
        break;
      case StoreOperation::kCancel:
        request.id = input[3];
        return request;
      default:
        request.keys = {key};
    }
    if (request.operation == StoreOperation::kMultiSet) {
      for (uint8_t i = 0; i < request.keys.size(); ++i) request.values.push_back(value(i));
    }
    const bool one = request.operation == StoreOperation::kSet || request.operation == StoreOperation::kAppend ||
                     request.operation == StoreOperation::kQueuePush;
    if (one) request.values = {value(0)};
    if (request.operation == StoreOperation::kCompareSet) request.values = {value(0), value(1)};
    if (request.operation == StoreOperation::kAdd) request.number = static_cast<int8_t>(input[3]);
    if (request.operation == StoreOperation::kBarrier) request.number = input[3] % 4;
    return request;
  }

  void compare_replies(Client& client, ClientId number) {
    Bytes out;
    while (true) {
      auto request = client.protocol->next(out);
      MUSTER_CHECK(request.has_value(), "a valid request was refused");
      if (!*request) return;
      const Replies expected = plain_.apply(**request, number);
      const Replies answers = single_.apply(**request, number);
      MUSTER_CHECK(same(answers, expected, **request), "the store differs from the model");
      MUSTER_CHECK(same(sharded_.apply(**request, number), expected, **request),
                   "a store of four shards differs from the model");
      MUSTER_CHECK(single_.waiters() == plain_.waiters(), "the number of waiters differs from the model");
      for (const Reply& reply : answers) {
        Client& to = clients_[reply.client];
        // PyTorch's protocol has no error replies. The client's connection is closed, and a new client takes its
        // number.
        if (!to.protocol->encode(reply, out)) leave(reply.client);
      }
    }
  }

  void leave(ClientId number) {
    plain_.drop(number);
    single_.drop(number);
    sharded_.drop(number);
    clients_[number] = Client(number % 2 == 1);
  }

  Client clients_[4] = {Client(false), Client(true), Client(false), Client(true)};
  PlainStore plain_;
  StoreState single_{1}, sharded_{4};
};

}  // namespace
}  // namespace muster

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  muster::RandomClients().run({data, size});
  return 0;
}
