#include "muster/group/form/host_comm_exchange.h"

#include <sys/epoll.h>

#include <algorithm>

#include "muster/io/socket.h"
#include "muster/shm/host_comm.h"

namespace muster {

HostCommExchange::HostCommExchange(Loop& loop, const Bytes& secret, Address address, const Deadline& deadline)
    : loop_(loop), credentials_{secret, nullptr}, address_(std::move(address)), deadline_(deadline) {}

HostCommExchange::~HostCommExchange() {
  for (const Connection& connection : connections_) loop_.unwatch(connection.stream->fd());
}

Result<> HostCommExchange::offer(int ranks) {
  waiting_ = ranks - 1;
  auto memory = HostComm::allocate(ranks);
  if (memory) {
    memory_ = std::move(*memory);
  } else if (memory.error().code == ErrorCode::kResourceExhausted) {
    no_memory_ = std::move(memory.error());
  } else {
    return tl::unexpected(std::move(memory.error()));
  }
  Acceptor::Options options;
  options.credentials = credentials_;
  MUSTER_ASSIGN(acceptor_, Acceptor::create(loop_, address_, options,
                                            [this](Connection connection) { await_request(std::move(connection)); }));
  return {};
}

/// Waits for a request before it sends the descriptor. A descriptor that is sent earlier could arrive while the peer
/// still reads the handshake, and would be lost.
void HostCommExchange::await_request(Connection connection) {
  const int fd = connection.stream->fd();
  connections_.push_back(std::move(connection));
  const auto watched = loop_.watch(fd, EPOLLIN, [this, fd](uint32_t) { answer_request(fd); });
  if (!watched && !error_) error_ = watched.error();
}

/// A connection that ends without a request is ignored: the links show whether a rank is lost.
void HostCommExchange::answer_request(int fd) {
  const auto connection = std::ranges::find(connections_, fd, [](const Connection& each) { return each.stream->fd(); });
  uint8_t request = 0;
  const iovec segment{&request, 1};
  const auto read = connection->stream->read({&segment, 1});
  if (read && *read == 0) return;  // the request has not arrived yet
  loop_.unwatch(fd);
  if (!read) {
    connections_.erase(connection);
    return;
  }
  const auto sent = send_fd(fd, memory_.get(), deadline_);
  if (!sent && !error_) error_ = sent.error();
  --waiting_;
}

Result<Fd> HostCommExchange::serve(const Interrupted& interrupted) {
  std::optional<Error> error;
  const auto over = [&] {
    error = error_ ? error_ : interrupted();
    return error || waiting_ == 0;
  };
  const auto waited = loop_.run_until(over, deadline_);
  if (error) return tl::unexpected(*error);
  if (!waited) return tl::unexpected(waited.error());
  return std::move(memory_);
}

Result<Fd> HostCommExchange::receive() {
  std::optional<Result<Connection>> connected;
  DialOptions options;
  options.retry = true;  // the first rank listens only once it knows the members
  options.credentials = credentials_;
  const auto attempt = dial(loop_, address_, options, deadline_,
                            [&](Result<Connection> connection) { connected = std::move(connection); });
  MUSTER_TRY(loop_.run_until([&] { return connected.has_value(); }, deadline_));
  if (!*connected) return tl::unexpected(connected->error());
  Stream& stream = *(**connected).stream;
  uint8_t request = 1;
  const iovec segment{&request, 1};
  MUSTER_TRY(stream.write({&segment, 1}));
  return receive_fd(stream.fd(), deadline_);
}

}  // namespace muster
