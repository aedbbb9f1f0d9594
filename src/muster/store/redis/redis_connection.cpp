#include "muster/store/redis/redis_connection.h"

#include <fmt/format.h>
#include <poll.h>

#include <array>

#include "muster/base/check.h"
#include "muster/io/socket.h"

namespace muster {
namespace {

// False at the deadline. Signals do not end the wait.
bool wait_for(int fd, short events, const Deadline& deadline) {
  pollfd poll{fd, events, 0};
  do {
    if (::poll(&poll, 1, deadline.poll_timeout_ms()) > 0) return true;
  } while (!deadline.passed());
  return false;
}

Result<Fd> connect_to(const Address& address, const Deadline& deadline) {
  MUSTER_ASSIGN(Fd socket, start_connect(address));
  if (!wait_for(socket.get(), POLLOUT, deadline)) {
    return fail(ErrorCode::kTimeout, "cannot connect to " + address.to_string() + " in time");
  }
  MUSTER_TRY(finish_connect(socket.get(), address));
  return socket;
}

// A name may have several addresses. Uses the first address that accepts a connection.
Result<Fd> connect_to(const RedisTarget& target, const Deadline& deadline) {
  if (!target.unix_path.empty()) {
    MUSTER_ASSIGN(const Address address, Address::parse("unix:" + target.unix_path));
    return connect_to(address, deadline);
  }
  MUSTER_ASSIGN(const auto addresses, resolve(target.host, target.port));
  Result<Fd> socket;
  for (const Address& address : addresses) {
    socket = connect_to(address, deadline);
    if (socket) break;
  }
  return socket;
}

Result<std::unique_ptr<Stream>> stream_to(const RedisTarget& target, Fd socket) {
  if (target.tls) return target.tls->wrap_client(std::move(socket), target.host);
  return plain_stream(std::move(socket));
}

// The first words of a Redis error give its kind.
ErrorCode code_of(std::string_view text) {
  const auto is = [&](auto... words) { return (text.starts_with(words) || ...); };
  if (is("NOAUTH", "WRONGPASS", "NOPERM", "ERR AUTH", "ERR Client sent AUTH")) return ErrorCode::kAuthentication;
  if (is("OOM", "ERR max number of clients")) return ErrorCode::kResourceExhausted;
  if (is("LOADING", "BUSY", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "MISCONF")) return ErrorCode::kUnavailable;
  return ErrorCode::kIo;
}

}  // namespace

std::string RedisTarget::name() const {
  return unix_path.empty() ? fmt::format("Redis at {}:{}", host, port) : "Redis at unix:" + unix_path;
}

Result<std::unique_ptr<RedisConnection>> RedisConnection::connect(const RedisTarget& target, const Deadline& deadline) {
  auto socket = connect_to(target, deadline);
  if (!socket) {
    return fail(socket.error().code == ErrorCode::kTimeout ? ErrorCode::kTimeout : ErrorCode::kUnavailable,
                fmt::format("cannot reach {}: {}", target.name(), socket.error().message));
  }
  MUSTER_ASSIGN(auto stream, stream_to(target, std::move(*socket)));
  std::unique_ptr<RedisConnection> connection(new RedisConnection(target.name(), std::move(stream)));
  if (!target.password.empty()) {
    const RedisWords with_user = {"AUTH", target.user, target.password};
    const RedisWords without = {"AUTH", target.password};
    MUSTER_TRY(connection->call(target.user.empty() ? without : with_user, deadline));
  }
  // Selects even the default database, because a server that requires a password refuses this command.
  MUSTER_TRY(connection->call({"SELECT", target.database}, deadline));
  return connection;
}

RedisConnection::RedisConnection(std::string name, std::unique_ptr<Stream> stream)
    : name_(std::move(name)), stream_(std::move(stream)), reader_(redisReaderCreate()) {
  MUSTER_CHECK(reader_ != nullptr, "out of memory");
}

RedisConnection::~RedisConnection() { redisReaderFree(reader_); }

Result<> RedisConnection::send(const RedisWords& words, const Deadline& deadline) {
  std::vector<const char*> texts;
  std::vector<size_t> sizes;
  for (const std::string_view word : words) {
    texts.push_back(word.data() == nullptr ? "" : word.data());
    sizes.push_back(word.size());
  }
  char* command = nullptr;
  const int size = redisFormatCommandArgv(&command, static_cast<int>(words.size()), texts.data(), sizes.data());
  if (size < 0) return fail(ErrorCode::kResourceExhausted, "there is no memory for a command to " + name_);
  const std::unique_ptr<char, decltype(&redisFreeCommand)> owner(command, &redisFreeCommand);
  for (size_t sent = 0; sent < static_cast<size_t>(size);) {
    const iovec rest{command + sent, static_cast<size_t>(size) - sent};
    const auto written = stream_->write({&rest, 1});
    if (!written) return broke(written.error());
    if (*written == 0) MUSTER_TRY(wait(deadline));
    sent += *written;
  }
  return {};
}

Result<RedisReply> RedisConnection::receive(const Deadline& deadline) {
  std::array<char, 64 << 10> buffer;
  while (true) {
    void* found = nullptr;
    if (redisReaderGetReply(reader_, &found) != REDIS_OK) return broke(reader_->errstr);
    if (RedisReply reply(static_cast<redisReply*>(found)); reply) {
      if (reply->type != REDIS_REPLY_ERROR) return reply;
      const std::string_view text(reply->str, reply->len);
      return fail(code_of(text), fmt::format("{} says: {}", name_, text));
    }
    const iovec segment{buffer.data(), buffer.size()};
    const auto n = stream_->read({&segment, 1});
    if (!n) return broke(n.error());
    if (*n == 0) MUSTER_TRY(wait(deadline));
    if (*n > 0 && redisReaderFeed(reader_, buffer.data(), *n) != REDIS_OK) return broke(reader_->errstr);
  }
}

Result<RedisReply> RedisConnection::call(const RedisWords& words, const Deadline& deadline) {
  auto reply = send(words, deadline).and_then([&] { return receive(deadline); });
  // A late reply would be read as the reply to the next command.
  if (!reply && reply.error().code == ErrorCode::kTimeout) broken_ = true;
  return reply;
}

bool RedisConnection::is_idle() const {
  pollfd poll{stream_->fd(), POLLIN, 0};
  return !broken_ && !stream_->has_buffered() && ::poll(&poll, 1, 0) == 0;
}

Result<> RedisConnection::wait(const Deadline& deadline) {
  // A TLS handshake waits for the server even in a write.
  if (wait_for(stream_->fd(), stream_->wants_write() ? POLLOUT : POLLIN, deadline)) return {};
  return fail(ErrorCode::kTimeout, name_ + " did not answer in time");
}

tl::unexpected<Error> RedisConnection::broke(std::string_view why) {
  return broke(Error{ErrorCode::kPeerLost, std::string(why)});
}

tl::unexpected<Error> RedisConnection::broke(const Error& why) {
  broken_ = true;
  // TLS refuses a certificate, or the server does not speak TLS.
  if (why.code == ErrorCode::kAuthentication || why.code == ErrorCode::kProtocol) {
    return fail(why.code, fmt::format("cannot talk to {} over TLS: {}", name_, why.message));
  }
  return fail(ErrorCode::kPeerLost, fmt::format("the connection to {} is lost: {}", name_, why.message));
}

}  // namespace muster
