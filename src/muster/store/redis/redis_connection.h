#pragma once

#include <hiredis/hiredis.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/clock.h"
#include "muster/io/stream.h"

namespace muster {

/// Where a Redis server is, and who we are there.
struct RedisTarget {
  std::string host;  ///< with `port`; or empty, and then unix_path says where
  uint16_t port = 6379;
  std::string unix_path;
  std::string user, password;  ///< no password: none is sent
  std::string database = "0";

  std::string name() const;  ///< for messages: "Redis at host:port"
};

struct FreeRedisReply {
  void operator()(redisReply* reply) const { freeReplyObject(reply); }
};
using RedisReply = std::unique_ptr<redisReply, FreeRedisReply>;
using RedisWords = std::vector<std::string_view>;

/// One connection to a Redis server: hiredis writes and reads the protocol, the socket is ours, so that every wait has
/// a deadline. After an error of I/O the connection is of no use any more: broken(). Not thread-safe.
class RedisConnection {
 public:
  static Result<std::unique_ptr<RedisConnection>> connect(const RedisTarget& target, const Deadline& deadline);
  ~RedisConnection();
  RedisConnection(const RedisConnection&) = delete;
  RedisConnection& operator=(const RedisConnection&) = delete;

  Result<> send(const RedisWords& words, const Deadline& deadline);
  /// The next reply. One that is an error (-ERR ...) is an Error whose message is what Redis says.
  Result<RedisReply> receive(const Deadline& deadline);
  Result<RedisReply> call(const RedisWords& words, const Deadline& deadline);

  bool broken() const { return broken_; }
  /// Whether it is still good after a time of rest: nothing came, not even its end.
  bool at_rest() const;

 private:
  RedisConnection(std::string name, std::unique_ptr<Stream> stream);
  Result<> wait(short events, const Deadline& deadline);
  tl::unexpected<Error> broke(Error why);

  const std::string name_;
  std::unique_ptr<Stream> stream_;
  redisReader* reader_;
  bool broken_ = false;
};

}  // namespace muster
