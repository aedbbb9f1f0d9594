#include "muster/store/redis/redis_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <optional>

#include "muster/store/external_store.h"
#include "muster/store/redis/redis_connection.h"
#include "muster/store/redis/redis_scripts.h"
#include "muster/store/ttl_lock.h"
#include "muster/store/url.h"

namespace muster {
namespace {

constexpr size_t kMaxValue = size_t{512} << 20;  // Redis' own limit
constexpr size_t kIdleConnections = 8;
// Redis loses a message only if the subscriber's connection breaks. The store still checks again at this interval, in
// case the server has lost its data.
constexpr Duration kPollInterval = 5s;

struct RedisLocation {
  RedisTarget target;
  std::string prefix;
};

std::string_view text_of(const redisReply& reply) { return {reply.str, reply.len}; }
std::string_view text_of(ByteView bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }
Bytes bytes_of(const redisReply& reply) { return to_bytes(text_of(reply)); }
std::string milliseconds(Duration duration) {
  return std::to_string(std::chrono::ceil<std::chrono::milliseconds>(duration).count());
}

// The connections that a store and its clones share. Each call takes a connection and gives it back.
class Connections {
 public:
  explicit Connections(RedisLocation location) : location_(std::move(location)) {}

  Result<std::unique_ptr<RedisConnection>> take(const Deadline& deadline) {
    {
      const std::lock_guard lock(mutex_);
      while (!idle_.empty()) {
        std::unique_ptr<RedisConnection> connection = std::move(idle_.back());
        idle_.pop_back();
        if (connection->is_idle()) return connection;
      }
    }
    return connect(deadline);
  }

  // Once the store is open, an unreachable server is reported as lost.
  Result<std::unique_ptr<RedisConnection>> connect(const Deadline& deadline) {
    auto connection = RedisConnection::connect(location_.target, deadline);
    if (connection || connection.error().code != ErrorCode::kUnavailable) return connection;
    return fail(ErrorCode::kPeerLost, connection.error().message);
  }

  void give_back(std::unique_ptr<RedisConnection> connection) {
    const std::lock_guard lock(mutex_);
    if (!connection->broken() && idle_.size() < kIdleConnections) idle_.push_back(std::move(connection));
  }

  // `arguments` are the words after the script's key.
  Result<RedisReply> run(const char* script, const RedisWords& arguments, const Deadline& deadline) {
    MUSTER_ASSIGN(auto connection, take(deadline));
    RedisWords words = {"EVAL", script, "1", location_.prefix};
    words.insert(words.end(), arguments.begin(), arguments.end());
    auto reply = connection->call(words, deadline);
    give_back(std::move(connection));
    return reply;
  }

  const RedisLocation& location() const { return location_; }

 private:
  const RedisLocation location_;
  std::mutex mutex_;  // guards idle_
  std::vector<std::unique_ptr<RedisConnection>> idle_;
};

// A connection that is subscribed to one channel.
class Listener {
 public:
  explicit Listener(std::unique_ptr<RedisConnection> connection) : connection_(std::move(connection)) {}
  const std::string& channel() const { return channel_; }

  Result<> subscribe(const std::string& channel, const Deadline& deadline) {
    if (!channel_.empty()) MUSTER_TRY(connection_->send({"UNSUBSCRIBE"}, deadline));
    MUSTER_TRY(connection_->send({"SUBSCRIBE", channel}, deadline));
    channel_ = channel;
    while (true) {
      MUSTER_ASSIGN(const RedisReply reply, connection_->receive(deadline));
      if (reply->elements == 3 && text_of(*reply->element[0]) == "subscribe") return {};
    }
  }

  // Returns when a message arrives, or at the deadline.
  Result<> wait_for_message(const Deadline& deadline) {
    const auto message = connection_->receive(deadline);
    if (message || message.error().code == ErrorCode::kTimeout) return {};
    return tl::unexpected(message.error());
  }

 private:
  std::unique_ptr<RedisConnection> connection_;
  std::string channel_;
};

// The script of an operation, and whether it may have to wait. A barrier has several scripts.
struct Script {
  StoreOperation operation;
  const char* text;
  bool waits = false;
};
constexpr Script kScripts[] = {
    {StoreOperation::kSet, redis_scripts::kSet},
    {StoreOperation::kMultiSet, redis_scripts::kMultiSet},
    {StoreOperation::kCompareSet, redis_scripts::kCompareSet},
    {StoreOperation::kAdd, redis_scripts::kAdd},
    {StoreOperation::kAppend, redis_scripts::kAppend},
    {StoreOperation::kQueuePush, redis_scripts::kPush},
    {StoreOperation::kCheck, redis_scripts::kWait},
    {StoreOperation::kListKeys, redis_scripts::kListKeys},
    {StoreOperation::kDelete, "return redis.call('HDEL', KEYS[1]..':data', ARGV[1])"},
    {StoreOperation::kQueueLength, "return redis.call('LLEN', KEYS[1]..':queue:'..ARGV[1])"},
    {StoreOperation::kNumKeys, "return redis.call('HLEN', KEYS[1]..':data')"},
    {StoreOperation::kGet, redis_scripts::kGet, /*waits=*/true},
    {StoreOperation::kMultiGet, redis_scripts::kGet, /*waits=*/true},
    {StoreOperation::kWait, redis_scripts::kWait, /*waits=*/true},
    {StoreOperation::kQueuePop, redis_scripts::kPop, /*waits=*/true},
};

class RedisStore : public ExternalStore {
 public:
  explicit RedisStore(std::shared_ptr<Connections> connections) : connections_(std::move(connections)) {}

  Result<std::unique_ptr<Store>> clone() override { return std::make_unique<RedisStore>(connections_); }
  std::optional<HostPort> address() const override {
    const RedisTarget& target = connections_->location().target;
    if (target.host.empty()) return std::nullopt;
    return HostPort{target.host, target.port};
  }
  Result<std::unique_ptr<TtlLock>> claim(const Key& name, ByteView value, Duration time_to_live,
                                         const Deadline& deadline) override {
    const std::string token = random_token(), life = milliseconds(time_to_live);
    const TimePoint asked = steady_clock().now();
    MUSTER_ASSIGN(const RedisReply taken, run(redis_scripts::kClaim, {name, token, life, text_of(value)}, deadline));
    if (taken->integer != 1) return lock_is_held(name);
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
  Result<std::map<Key, Bytes>> claims(std::string_view prefix, const Deadline& deadline) override {
    MUSTER_ASSIGN(const RedisReply found, run(redis_scripts::kClaims, {prefix}, deadline));
    std::map<Key, Bytes> result;
    for (size_t i = 0; i + 1 < found->elements; i += 2) {
      result.emplace(text_of(*found->element[i]), bytes_of(*found->element[i + 1]));
    }
    return result;
  }

 protected:
  Result<Reply> carry_out(Request& request, const Deadline& deadline) override {
    for (const Bytes& value : request.values) {
      if (value.size() <= kMaxValue) continue;
      return fail(ErrorCode::kResourceExhausted,
                  fmt::format("got a value of {} bytes, Redis' limit is {}", value.size(), kMaxValue));
    }
    if (request.operation == StoreOperation::kBarrier) return arrive(request, deadline);
    const auto* script = std::ranges::find(kScripts, request.operation, &Script::operation);
    if (script == std::end(kScripts)) {
      return fail(ErrorCode::kUnsupported, fmt::format("Redis has no {}", name(request.operation)));
    }
    return script->waits ? do_wait(request, script->text, deadline) : run_at_once(request, script->text, deadline);
  }
  std::string server() const override { return connections_->location().target.name(); }

 private:
  Result<RedisReply> run(const char* script, const RedisWords& arguments, const Deadline& deadline) {
    return connections_->run(script, arguments, with_grace(deadline));
  }

  Result<Reply> run_at_once(const Request& request, const char* script, const Deadline& deadline) {
    const StoreOperation operation = request.operation;
    const bool adds = operation == StoreOperation::kAdd, appends = operation == StoreOperation::kAppend;
    const std::string number = std::to_string(adds ? request.number : static_cast<int64_t>(kMaxValue));
    RedisWords words;
    if (operation == StoreOperation::kCheck) words.emplace_back("1");
    for (size_t i = 0; i < std::max(request.keys.size(), request.values.size()); ++i) {
      if (i < request.keys.size()) words.emplace_back(request.keys[i]);
      if (i < request.values.size()) words.push_back(text_of(request.values[i]));
    }
    if (adds || appends) words.emplace_back(number);
    const auto answer = run(script, words, deadline);
    if (!answer) {
      const auto says = [&](const char* text) {
        return adds && answer.error().message.find(text) != std::string::npos;
      };
      if (says("overflow")) return add_overflow(request.keys[0], request.number);
      if (says("not an integer")) return not_a_number(request.keys[0]);
      return tl::unexpected(answer.error());
    }
    const redisReply& found = **answer;
    if (appends && found.integer != 1) {
      return fail(ErrorCode::kResourceExhausted,
                  fmt::format("append would grow key \"{}\" over Redis' limit of {} bytes", request.keys[0], number));
    }
    Reply reply = number_reply(adds ? std::strtoll(found.str, nullptr, 10) : found.integer);
    if (operation == StoreOperation::kCheck) reply.number = found.type == REDIS_REPLY_ARRAY;
    if (operation == StoreOperation::kCompareSet) reply.values.push_back(bytes_of(found));
    for (size_t i = 0; operation == StoreOperation::kListKeys && i < found.elements; ++i) {
      reply.keys.emplace_back(text_of(*found.element[i]));
    }
    return reply;
  }

  // Runs a script that may have to wait. Runs it again after each message about the missing key.
  Result<RedisReply> until_there(const char* script, RedisWords arguments, const std::vector<Key>& keys,
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
      if (missing >= keys.size()) return fail(ErrorCode::kProtocol, "Redis returned a key number that is out of range");
      cursor = std::to_string(missing + 1);
      const std::string channel = connections_->location().prefix + ":event:" + keys[missing];
      if (!listener) {
        MUSTER_ASSIGN(auto connection, connections_->connect(with_grace(deadline)));
        listener.emplace(std::move(connection));
      }
      // After subscribing, the script runs again, because the key may have appeared in between.
      if (listener->channel() == channel) {
        MUSTER_TRY(listener->wait_for_message(deadline.or_sooner(deadline.clock().now() + kPollInterval)));
      } else {
        MUSTER_TRY(listener->subscribe(channel, with_grace(deadline)));
      }
    }
  }

  Result<Reply> do_wait(const Request& request, const char* script, const Deadline& deadline) {
    RedisWords words = {""};
    words.insert(words.end(), request.keys.begin(), request.keys.end());
    MUSTER_ASSIGN(const RedisReply found, until_there(script, std::move(words), request.keys, deadline));
    Reply reply;
    const bool pop = request.operation == StoreOperation::kQueuePop;
    for (size_t i = pop ? 1 : 0; i < found->elements; ++i) reply.values.push_back(bytes_of(*found->element[i]));
    if (pop) reply.number = found->element[0]->integer;
    return reply;
  }

  Result<Reply> arrive(const Request& request, const Deadline& deadline) {
    const Key& key = request.keys[0];
    const std::string count = std::to_string(request.number), id = random_token(),
                      patience = milliseconds(deadline.left());
    RedisWords words = {"", key, count, id, patience};
    MUSTER_ASSIGN(const RedisReply arrived, run(redis_scripts::kArrive, words, deadline));
    if (arrived->type == REDIS_REPLY_ARRAY && arrived->elements == 2) {
      return barrier_mismatch(key, request.number, arrived->element[0]->integer,
                              std::strtoll(arrived->element[1]->str, nullptr, 10));
    }
    if (arrived->type == REDIS_REPLY_ARRAY) return Reply{};
    const auto released = until_there(redis_scripts::kReleased, words, request.keys, deadline);
    if (released) return Reply{};
    // Removes the arrival. If it is already gone, the barrier has released the caller. If the server does not answer
    // now, kArrive of a later caller removes the arrival, a minute after its timeout.
    const auto withdrawn = run(redis_scripts::kWithdraw, words, Deadline::after({}));
    if (withdrawn && (*withdrawn)->integer == 0) return Reply{};
    return tl::unexpected(released.error());
  }

  std::shared_ptr<Connections> connections_;  // shared by the clones
};

Result<RedisLocation> parse_location(const std::string& text) {
  MUSTER_ASSIGN(Url url, Url::parse(text, RedisTarget{}.port));
  RedisLocation location{{.user = url.user, .password = url.password}, url.take("prefix", "")};
  const std::string database = url.take("database", url.take("db", ""));
  const bool tls = url.scheme == "rediss";
  if (tls) {
    const TlsFiles files{url.take("cert", ""), url.take("key", ""), url.take("ca", "")};
    MUSTER_ASSIGN(location.target.tls, TlsContext::load_client(files));
  }
  MUSTER_TRY(
      url.finish(tls ? "prefix, database, ca, cert and key" : "prefix and database; certificates go with rediss://"));
  if (url.scheme == "redis+unix") {
    location.target.unix_path = "/" + url.path;
    url.path.clear();
  } else if (url.hosts.size() == 1) {
    location.target.host = url.hosts[0].host;
    location.target.port = url.hosts[0].port;
  } else {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("a {0}:// URL must have one host: {0}://host:6379/0?prefix=job", url.scheme));
  }
  std::string_view path = url.path;
  const std::string_view first = path.substr(0, path.find('/'));
  const bool numbered = !first.empty() && first.find_first_not_of("0123456789") == std::string_view::npos;
  if (numbered) path.remove_prefix(std::min(first.size() + 1, path.size()));
  location.target.database = !database.empty() ? database : numbered ? std::string(first) : "0";
  if (location.prefix.empty()) location.prefix = path.empty() ? "muster" : path;
  return location;
}

}  // namespace

Result<std::unique_ptr<Store>> redis_store(const std::string& url, const Deadline& deadline) {
  MUSTER_ASSIGN(RedisLocation location, parse_location(url));
  MUSTER_ASSIGN(auto first, RedisConnection::connect(location.target, deadline));
  auto connections = std::make_shared<Connections>(std::move(location));
  connections->give_back(std::move(first));
  return std::make_unique<RedisStore>(std::move(connections));
}

}  // namespace muster
