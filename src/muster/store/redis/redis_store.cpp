#include "muster/store/redis/redis_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <optional>

#include "muster/base/random.h"
#include "muster/store/redis/redis_connection.h"
#include "muster/store/redis/redis_scripts.h"
#include "muster/store/request_store.h"
#include "muster/store/ttl_lock.h"
#include "muster/store/url.h"

namespace muster {
namespace {

constexpr size_t kMaxValue = size_t{512} << 20;  // Redis' own limit
constexpr size_t kIdleConnections = 8;
// A message to a listener can be lost only with its connection; looking again is for a server that forgot its data.
constexpr Duration kLookAgain = 5s;

struct RedisPlace {
  RedisTarget target;
  std::string prefix;
};

std::string_view text_of(const redisReply& reply) { return {reply.str, reply.len}; }
std::string_view text_of(ByteView bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }
Bytes bytes_of(const redisReply& reply) { return to_bytes(text_of(reply)); }
std::string milliseconds(Duration duration) {
  return std::to_string(std::chrono::ceil<std::chrono::milliseconds>(duration).count());
}

std::string new_token() {
  Bytes token(16);
  fill_secure_random(token);
  return to_hex(token);
}

// The connections that clones and threads share: each call has one to itself, and gives it back.
class Connections {
 public:
  explicit Connections(RedisPlace place) : place_(std::move(place)) {}

  Result<std::unique_ptr<RedisConnection>> take(const Deadline& deadline) {
    {
      const std::lock_guard lock(mutex_);
      while (!idle_.empty()) {
        std::unique_ptr<RedisConnection> connection = std::move(idle_.back());
        idle_.pop_back();
        if (connection->at_rest()) return connection;
      }
    }
    return connect(deadline);
  }

  // In the middle of things a server that cannot be reached is one that was lost.
  Result<std::unique_ptr<RedisConnection>> connect(const Deadline& deadline) {
    auto connection = RedisConnection::connect(place_.target, deadline);
    if (connection || connection.error().code != ErrorCode::kUnavailable) return connection;
    return fail(ErrorCode::kPeerLost, connection.error().message);
  }

  void give_back(std::unique_ptr<RedisConnection> connection) {
    const std::lock_guard lock(mutex_);
    if (!connection->broken() && idle_.size() < kIdleConnections) idle_.push_back(std::move(connection));
  }

  // The words after the script's keys.
  Result<RedisReply> run(const char* script, const RedisWords& arguments, const Deadline& deadline) {
    MUSTER_ASSIGN(auto connection, take(deadline));
    RedisWords words = {"EVAL", script, "1", place_.prefix};
    words.insert(words.end(), arguments.begin(), arguments.end());
    auto reply = connection->call(words, deadline);
    give_back(std::move(connection));
    return reply;
  }

  const RedisPlace& place() const { return place_; }

 private:
  const RedisPlace place_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<RedisConnection>> idle_;
};

// A connection that listens to one channel at a time.
class Listener {
 public:
  static Result<Listener> create(Connections& connections, const Deadline& deadline) {
    MUSTER_ASSIGN(auto connection, connections.connect(deadline));
    return Listener(std::move(connection));
  }

  const std::string& channel() const { return channel_; }

  Result<> listen_to(const std::string& channel, const Deadline& deadline) {
    if (!channel_.empty()) MUSTER_TRY(connection_->send({"UNSUBSCRIBE"}, deadline));
    MUSTER_TRY(connection_->send({"SUBSCRIBE", channel}, deadline));
    channel_ = channel;
    while (true) {
      MUSTER_ASSIGN(const RedisReply reply, connection_->receive(deadline));
      if (reply->elements == 3 && text_of(*reply->element[0]) == "subscribe") return {};
    }
  }

  // Until something is said, or the deadline.
  Result<> hear(const Deadline& deadline) {
    const auto message = connection_->receive(deadline);
    if (message || message.error().code == ErrorCode::kTimeout) return {};
    return tl::unexpected(message.error());
  }

 private:
  explicit Listener(std::unique_ptr<RedisConnection> connection) : connection_(std::move(connection)) {}
  std::unique_ptr<RedisConnection> connection_;
  std::string channel_;
};

class RedisStore : public RequestStore {
 public:
  explicit RedisStore(std::shared_ptr<Connections> connections) : connections_(std::move(connections)) {}

  Result<std::unique_ptr<Store>> clone() override { return std::make_unique<RedisStore>(connections_); }
  Result<std::unique_ptr<TtlLock>> claim(const Key& name, ByteView value, Duration time_to_live,
                                         const Deadline& deadline) override;
  Result<std::map<Key, Bytes>> claims(std::string_view prefix, const Deadline& deadline) override;

 protected:
  Result<Reply> call(Request request, const Deadline& deadline) override;

 private:
  Result<RedisReply> run(const char* script, const RedisWords& arguments, const Deadline& deadline) {
    return connections_->run(script, arguments, with_grace(deadline));
  }
  Result<Reply> write(const Request& request, const Deadline& deadline);
  Result<Reply> read(const Request& request, const Deadline& deadline);
  Result<Reply> do_add(const Request& request, const Deadline& deadline);
  Result<Reply> do_append(const Request& request, const Deadline& deadline);
  Result<Reply> do_wait(const Request& request, const char* script, const Deadline& deadline);
  Result<Reply> arrive(const Request& request, const Deadline& deadline);
  Result<RedisReply> until_there(const char* script, RedisWords arguments, const std::vector<Key>& keys,
                                 const Deadline& deadline);

  std::shared_ptr<Connections> connections_;  // shared by the clones
};

Result<Reply> RedisStore::call(Request request, const Deadline& deadline) {
  MUSTER_TRY(validate(request));
  for (const Bytes& value : request.values) {
    if (value.size() <= kMaxValue) continue;
    return fail(ErrorCode::kResourceExhausted, fmt::format("{} was given a value of {} bytes, Redis takes {} at most",
                                                           describe(request), value.size(), kMaxValue));
  }
  const auto carry_out = [&]() -> Result<Reply> {
    switch (request.operation) {
      case StoreOperation::kGet:
      case StoreOperation::kMultiGet:
        return do_wait(request, redis_scripts::kGet, deadline);
      case StoreOperation::kWait:
        return do_wait(request, redis_scripts::kWait, deadline);
      case StoreOperation::kQueuePop:
        return do_wait(request, redis_scripts::kPop, deadline);
      case StoreOperation::kBarrier:
        return arrive(request, deadline);
      case StoreOperation::kCheck:
      case StoreOperation::kNumKeys:
      case StoreOperation::kQueueLength:
      case StoreOperation::kListKeys:
        return read(request, deadline);
      case StoreOperation::kAdd:
        return do_add(request, deadline);
      case StoreOperation::kAppend:
        return do_append(request, deadline);
      default:
        return write(request, deadline);
    }
  };
  Result<Reply> reply = carry_out();
  if (reply) return reply;
  if (reply.error().code != ErrorCode::kTimeout) return tl::unexpected(reply.error().in(describe(request)));
  return tl::unexpected(timed_out(request, connections_->place().target.name()));
}

// ---- what is done at once

Result<Reply> RedisStore::write(const Request& request, const Deadline& deadline) {
  RedisWords words;
  for (size_t i = 0; i < std::max(request.keys.size(), request.values.size()); ++i) {
    if (i < request.keys.size()) words.emplace_back(request.keys[i]);
    if (i < request.values.size()) words.push_back(text_of(request.values[i]));
  }
  Reply reply;
  switch (request.operation) {
    case StoreOperation::kSet:
      MUSTER_TRY(run(redis_scripts::kSet, words, deadline));
      return reply;
    case StoreOperation::kMultiSet:
      MUSTER_TRY(run(redis_scripts::kMultiSet, words, deadline));
      return reply;
    case StoreOperation::kQueuePush:
      MUSTER_TRY(run(redis_scripts::kPush, words, deadline));
      return reply;
    case StoreOperation::kCompareSet: {
      MUSTER_ASSIGN(const RedisReply now, run(redis_scripts::kCompareSet, words, deadline));
      reply.values.push_back(bytes_of(*now));
      return reply;
    }
    case StoreOperation::kDelete: {
      MUSTER_ASSIGN(const RedisReply gone,
                    run("return redis.call('HDEL', KEYS[1]..':data', ARGV[1])", words, deadline));
      reply.number = gone->integer;
      return reply;
    }
    default:
      return fail(ErrorCode::kUnsupported, fmt::format("Redis has no {}", name(request.operation)));
  }
}

Result<Reply> RedisStore::do_add(const Request& request, const Deadline& deadline) {
  const std::string amount = std::to_string(request.number);
  const auto sum = run(redis_scripts::kAdd, {request.keys[0], amount}, deadline);
  Reply reply;
  if (sum) {
    reply.number = std::strtoll((*sum)->str, nullptr, 10);
    return reply;
  }
  const bool overflows = sum.error().message.find("overflow") != std::string::npos;
  if (overflows || sum.error().message.find("not an integer") != std::string::npos) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("adding {} to key \"{}\" {}", amount, request.keys[0],
                            overflows ? "would overflow 64 bits" : "needs a decimal number there"));
  }
  return tl::unexpected(sum.error());
}

Result<Reply> RedisStore::do_append(const Request& request, const Deadline& deadline) {
  const std::string limit = std::to_string(kMaxValue);
  MUSTER_ASSIGN(const RedisReply fits,
                run(redis_scripts::kAppend, {request.keys[0], text_of(request.values[0]), limit}, deadline));
  if (fits->integer == 1) return Reply{};
  return fail(ErrorCode::kResourceExhausted,
              fmt::format("append would grow key \"{}\" over Redis' {} bytes", request.keys[0], limit));
}

Result<Reply> RedisStore::read(const Request& request, const Deadline& deadline) {
  Reply reply;
  switch (request.operation) {
    case StoreOperation::kCheck: {
      RedisWords words = {"1"};
      words.insert(words.end(), request.keys.begin(), request.keys.end());
      MUSTER_ASSIGN(const RedisReply found, run(redis_scripts::kWait, words, deadline));
      reply.number = found->type == REDIS_REPLY_ARRAY ? 1 : 0;
      return reply;
    }
    case StoreOperation::kListKeys: {
      MUSTER_ASSIGN(const RedisReply found, run(redis_scripts::kListKeys, {request.keys[0]}, deadline));
      for (size_t i = 0; i < found->elements; ++i) reply.keys.emplace_back(text_of(*found->element[i]));
      std::sort(reply.keys.begin(), reply.keys.end());
      return reply;
    }
    default: {
      const bool queue = request.operation == StoreOperation::kQueueLength;
      const char* script = queue ? "return redis.call('LLEN', KEYS[1]..':queue:'..ARGV[1])"
                                 : "return redis.call('HLEN', KEYS[1]..':data')";
      MUSTER_ASSIGN(const RedisReply length,
                    run(script, RedisWords(request.keys.begin(), request.keys.end()), deadline));
      reply.number = length->integer;
      return reply;
    }
  }
}

// ---- what may wait

// Runs a script that may have to wait: again each time that there is news of the key that it misses.
Result<RedisReply> RedisStore::until_there(const char* script, RedisWords arguments, const std::vector<Key>& keys,
                                           const Deadline& deadline) {
  std::optional<Listener> listener;
  std::string cursor = "1";
  while (true) {
    const bool last = deadline.passed();
    arguments[0] = cursor;
    MUSTER_ASSIGN(RedisReply reply, run(script, arguments, deadline));
    if (reply->type == REDIS_REPLY_ARRAY) return reply;
    if (last) return fail(ErrorCode::kTimeout, "the deadline has passed");
    const size_t missing = static_cast<size_t>(reply->integer) - 1;
    if (missing >= keys.size()) return fail(ErrorCode::kProtocol, "Redis answered with what the script cannot say");
    cursor = std::to_string(missing + 1);
    const std::string channel = connections_->place().prefix + ":event:" + keys[missing];
    if (!listener) {
      MUSTER_ASSIGN(listener, Listener::create(*connections_, with_grace(deadline)));
    }
    // Once it listens it looks again, for what happened in between.
    if (listener->channel() == channel) {
      MUSTER_TRY(listener->hear(deadline.or_sooner(deadline.clock().now() + kLookAgain)));
    } else {
      MUSTER_TRY(listener->listen_to(channel, with_grace(deadline)));
    }
  }
}

Result<Reply> RedisStore::do_wait(const Request& request, const char* script, const Deadline& deadline) {
  RedisWords words = {""};
  words.insert(words.end(), request.keys.begin(), request.keys.end());
  MUSTER_ASSIGN(const RedisReply found, until_there(script, std::move(words), request.keys, deadline));
  Reply reply;
  const bool pop = request.operation == StoreOperation::kQueuePop;
  for (size_t i = pop ? 1 : 0; i < found->elements; ++i) reply.values.push_back(bytes_of(*found->element[i]));
  if (pop) reply.number = found->element[0]->integer;
  return reply;
}

Result<Reply> RedisStore::arrive(const Request& request, const Deadline& deadline) {
  const Key& key = request.keys[0];
  if (request.number < 1) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("barrier \"{}\" was given a count of {}, it takes 1 or more", key, request.number));
  }
  const std::string count = std::to_string(request.number), id = new_token(), patience = milliseconds(deadline.left());
  RedisWords words = {"", key, count, id, patience};
  MUSTER_ASSIGN(const RedisReply arrived, run(redis_scripts::kArrive, words, deadline));
  if (arrived->type == REDIS_REPLY_ARRAY && arrived->elements == 2) {
    return fail(ErrorCode::kMismatch,
                fmt::format("barrier \"{}\" was given a count of {}, but {} caller(s) already wait there for {}", key,
                            count, arrived->element[0]->integer, text_of(*arrived->element[1])));
  }
  if (arrived->type == REDIS_REPLY_ARRAY) return Reply{};
  const auto released = until_there(redis_scripts::kReleased, words, request.keys, deadline);
  if (released) return Reply{};
  // The release may have come first; a server that does not answer will sweep the arrival out.
  const auto withdrawn = run(redis_scripts::kWithdraw, words, Deadline::after({}));
  if (withdrawn && (*withdrawn)->integer == 0) return Reply{};
  return tl::unexpected(released.error());
}

// ---- claims

Result<std::unique_ptr<TtlLock>> RedisStore::claim(const Key& name, ByteView value, Duration time_to_live,
                                                   const Deadline& deadline) {
  const std::string token = new_token(), life = milliseconds(time_to_live);
  const TimePoint asked = steady_clock().now();
  MUSTER_ASSIGN(const RedisReply taken, run(redis_scripts::kClaim, {name, token, life, text_of(value)}, deadline));
  if (taken->integer != 1) {
    return fail(ErrorCode::kAlreadyExists, fmt::format("the claim \"{}\" is held by another", name));
  }
  const auto renew = [connections = connections_, name, token](const std::string& ms, const Deadline& until) {
    return connections->run(redis_scripts::kRenew, {name, token, ms}, until);
  };
  return std::make_unique<RenewedTtlLock>(
      RenewedTtlLock::Store{[renew, life](const Deadline& until) -> Result<bool> {
                            MUSTER_ASSIGN(const RedisReply stands, renew(life, until));
                            return stands->integer == 1;
                          },
                          [renew](const Deadline& until) { (void)renew("0", until); }},
      asked, time_to_live);
}

Result<std::map<Key, Bytes>> RedisStore::claims(std::string_view prefix, const Deadline& deadline) {
  MUSTER_ASSIGN(const RedisReply found, run(redis_scripts::kClaims, {prefix}, deadline));
  std::map<Key, Bytes> result;
  for (size_t i = 0; i + 1 < found->elements; i += 2) {
    result.emplace(text_of(*found->element[i]), bytes_of(*found->element[i + 1]));
  }
  return result;
}

Result<RedisPlace> parse_place(const std::string& text) {
  MUSTER_ASSIGN(Url url, Url::parse(text, RedisTarget{}.port));
  RedisPlace place{{.user = url.user, .password = url.password}, url.take("prefix", "")};
  const std::string database = url.take("database", url.take("db", ""));
  MUSTER_TRY(url.finish("prefix and database"));
  if (url.scheme == "redis+unix") {
    place.target.unix_path = "/" + url.path;
    url.path.clear();
  } else if (url.hosts.size() == 1) {
    place.target.host = url.hosts[0].host;
    place.target.port = url.hosts[0].port;
  } else {
    return fail(ErrorCode::kInvalidArgument, "a redis:// URL names one host: redis://host:6379/0?prefix=job");
  }
  std::string_view path = url.path;
  const std::string_view first = path.substr(0, path.find('/'));
  const bool numbered = !first.empty() && first.find_first_not_of("0123456789") == std::string_view::npos;
  if (numbered) path.remove_prefix(std::min(first.size() + 1, path.size()));
  place.target.database = !database.empty() ? database : numbered ? std::string(first) : "0";
  if (place.prefix.empty()) place.prefix = path.empty() ? "muster" : path;
  return place;
}

}  // namespace

Result<std::unique_ptr<Store>> redis_store(const std::string& url, const Deadline& deadline) {
  MUSTER_ASSIGN(RedisPlace place, parse_place(url));
  MUSTER_ASSIGN(auto first, RedisConnection::connect(place.target, deadline));
  auto connections = std::make_shared<Connections>(std::move(place));
  connections->give_back(std::move(first));
  return std::make_unique<RedisStore>(std::move(connections));
}

}  // namespace muster
