#pragma once

#include <hiredis/hiredis.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/clock.h"
#include "muster/io/connect/tls.h"
#include "muster/io/stream.h"

namespace muster {

/// The address of a Redis server, and the login.
struct RedisTarget {
  std::string host;  ///< empty: unix_path is the address
  uint16_t port = 6379;
  std::string unix_path;
  std::string user, password;  ///< an empty password means no login
  std::string database = "0";
  std::shared_ptr<TlsContext> tls;  ///< null: no TLS

  std::string name() const;  ///< for messages: "Redis at host:port"
};

struct FreeRedisReply {
  void operator()(redisReply* reply) const { freeReplyObject(reply); }
};
using RedisReply = std::unique_ptr<redisReply, FreeRedisReply>;
using RedisWords = std::vector<std::string_view>;

/// A connection to a Redis server. hiredis encodes and decodes the protocol; this class does the I/O, so every wait has
/// a deadline. After an I/O error it is broken() and cannot be used again. Not thread-safe.
class RedisConnection {
 public:
  static Result<std::unique_ptr<RedisConnection>> connect(const RedisTarget& target, const Deadline& deadline);
  ~RedisConnection();
  RedisConnection(const RedisConnection&) = delete;
  RedisConnection& operator=(const RedisConnection&) = delete;

  Result<> send(const RedisWords& words, const Deadline& deadline);
  /// The next reply. A Redis error (-ERR ...) is an Error with Redis's message.
  Result<RedisReply> receive(const Deadline& deadline);
  Result<RedisReply> call(const RedisWords& words, const Deadline& deadline);

  bool broken() const { return broken_; }
  /// True if an idle connection can be used again: it is not broken, has no unread input, and was not closed by the
  /// server.
  bool is_idle() const;

 private:
  RedisConnection(std::string name, std::unique_ptr<Stream> stream);
  /// After a read or write that would block.
  Result<> wait(const Deadline& deadline);
  tl::unexpected<Error> broke(std::string_view why);
  tl::unexpected<Error> broke(const Error& why);

  const std::string name_;
  std::unique_ptr<Stream> stream_;
  redisReader* reader_;
  bool broken_ = false;
};

}  // namespace muster
