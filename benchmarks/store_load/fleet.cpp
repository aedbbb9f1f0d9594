#include "fleet.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>

namespace muster::load {
namespace {

constexpr size_t kConnectingAtOnce = 512;
constexpr size_t kFleetEvents = 512;
// Connections from one source address to one port are limited by the range of local ports.
constexpr size_t kClientsPerSource = 8192;

const Step& greeting() {
  static const Step step = greet();
  return step;
}

// 127.0.0.1 for the first clients, 127.0.0.2 for the next, ...
sockaddr_in source_of(size_t index) {
  sockaddr_in source{};
  source.sin_family = AF_INET;
  source.sin_addr.s_addr = htonl(INADDR_LOOPBACK + static_cast<uint32_t>(index / kClientsPerSource));
  return source;
}

}  // namespace

Result<Fleet> Fleet::create(bool check) {
  Fd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) return fail_errno(errno, "cannot make an epoll descriptor");
  return Fleet(std::move(epoll), check);
}

Result<> Fleet::open(const Address& server) {
  const size_t index = clients_.size();
  Client& client = clients_.emplace_back();
  client.socket.reset(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int fd = client.socket.get();
  if (fd < 0) return fail_errno(errno, fmt::format("cannot make the socket of client {}", index));
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
  const sockaddr_in source = source_of(index);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&source), sizeof(source)) != 0) {
    return fail_errno(errno, fmt::format("cannot bind client {}", index));
  }
  if (::connect(fd, server.raw(), server.raw_length()) != 0 && errno != EINPROGRESS) {
    return fail_errno(errno, fmt::format("client {} cannot connect to {}", index, server.to_string()));
  }
  epoll_event event{EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, {.u64 = index}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return fail_errno(errno, "cannot watch a client");
  client.step = &greeting();
  client.began = steady_clock().now();
  ++active_;
  return {};
}

Result<> Fleet::connect(const Address& server, size_t count, const Deadline& deadline, const Done& done) {
  return connect([&](size_t) { return server; }, count, deadline, done);
}

Result<> Fleet::connect(const std::function<Address(size_t client)>& server_of, size_t count, const Deadline& deadline,
                        const Done& done) {
  const size_t end = clients_.size() + count;
  clients_.reserve(end);
  while (clients_.size() < end || active_ > 0) {
    while (clients_.size() < end && active_ < kConnectingAtOnce) MUSTER_TRY(open(server_of(clients_.size())));
    MUSTER_TRY(turn(deadline, nullptr, done));
  }
  return {};
}

Result<> Fleet::begin(size_t index, const Step& step) {
  Client& client = clients_[index];
  client.step = &step;
  client.sent = client.received = 0;
  client.began = steady_clock().now();
  ++active_;
  return send(index);
}

Result<> Fleet::send(size_t index) {
  Client& client = clients_[index];
  while (client.sent < client.step->request.size()) {
    const ByteView rest = ByteView(client.step->request).subspan(client.sent);
    const ssize_t n = ::send(client.socket.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EAGAIN) break;
    if (n < 0) return fail_errno(errno, fmt::format("client {} of {} cannot send", index, clients_.size()));
    client.sent += static_cast<size_t>(n);
  }
  return {};
}

// True when the reply is whole.
Result<bool> Fleet::receive(size_t index) {
  Client& client = clients_[index];
  while (client.received < client.step->reply_bytes) {
    const ssize_t n = recv(client.socket.get(), buffer_.data(), buffer_.size(), 0);
    if (n < 0 && errno == EAGAIN) return false;
    if (n <= 0) {
      return fail(ErrorCode::kPeerLost, fmt::format("the server cut client {} of {} off", index, clients_.size()));
    }
    const auto count = static_cast<size_t>(n);
    const Bytes& reply = client.step->reply;
    const bool fits = client.received + count <= client.step->reply_bytes;
    const bool compared = check_ && !reply.empty();
    if (!fits || (compared && !std::equal(buffer_.data(), buffer_.data() + count, reply.data() + client.received))) {
      return fail(ErrorCode::kProtocol, fmt::format("client {} got a wrong answer", index));
    }
    client.received += count;
  }
  return true;
}

Result<> Fleet::on_event(size_t index, uint32_t events, const Next& next, const Done& done) {
  Client& client = clients_[index];
  if (client.step == nullptr) {
    if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) {
      return fail(ErrorCode::kPeerLost, fmt::format("the server cut idle client {} off", index));
    }
    return {};
  }
  client.connected = client.connected || (events & (EPOLLOUT | EPOLLERR)) != 0;
  if (!client.connected) return {};
  if (client.sent < client.step->request.size()) MUSTER_TRY(send(index));
  MUSTER_ASSIGN(const bool whole, receive(index));
  if (!whole) return {};
  --active_;
  const TimePoint now = steady_clock().now();
  if (done) done(index, now - client.began);
  client.step = nullptr;
  const Step* step = next ? next(index) : nullptr;
  return step != nullptr ? begin(index, *step) : Result<>{};
}

Result<> Fleet::turn(const Deadline& deadline, const Next& next, const Done& done) {
  epoll_event events[kFleetEvents];
  const int ready = epoll_wait(epoll_.get(), events, kFleetEvents, deadline.poll_timeout_ms());
  if (ready < 0 && errno != EINTR) return fail_errno(errno, "cannot wait for replies");
  for (int i = 0; i < ready; ++i) MUSTER_TRY(on_event(events[i].data.u64, events[i].events, next, done));
  if (!deadline.passed()) return {};
  return fail(ErrorCode::kTimeout, fmt::format("{} of {} clients have no reply in time", active_, clients_.size()));
}

Result<> Fleet::drive(const Deadline& deadline, const Next& next, const Done& done) {
  while (active_ > 0) MUSTER_TRY(turn(deadline, next, done));
  return {};
}

Result<> Fleet::run(const Deadline& deadline, const Next& next, const Done& done) {
  for (size_t index = 0; index < clients_.size(); ++index) {
    if (const Step* step = next(index)) MUSTER_TRY(begin(index, *step));
  }
  return drive(deadline, next, done);
}

void Fleet::reset() {
  const linger at_once{1, 0};
  for (Client& client : clients_) {
    setsockopt(client.socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  }
  clients_.clear();
  active_ = 0;
}

}  // namespace muster::load
