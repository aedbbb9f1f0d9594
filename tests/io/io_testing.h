#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "muster/base/check.h"
#include "muster/io/connection.h"
#include "muster/io/socket.h"

namespace muster {

inline Deadline soon() { return Deadline::after(60s); }

inline std::unique_ptr<Loop> make_loop() {
  auto loop = Loop::create();
  MUSTER_CHECK(loop.has_value(), loop.error().message);
  return std::move(*loop);
}

/// Drives the loop until `done()`. `done` may depend on state that the loop does not watch.
inline bool drive_until(Loop& loop, const std::function<bool()>& done) {
  const Deadline deadline = soon();
  while (!done()) {
    if (deadline.passed()) return false;
    loop.run_once(Deadline::after(1ms));
  }
  return true;
}

inline Address loopback() { return *Address::parse("127.0.0.1:0"); }

/// An abstract Unix address that no other test process uses.
inline Address unix_here(const std::string& name) {
  return Address::unix_abstract("muster-test-" + std::to_string(getpid()) + "-" + name);
}

inline bool has_ipv6() { return listen_on(*Address::parse("[::1]:0")).has_value(); }

/// Two connected stream sockets.
struct SocketPair {
  Fd one, two;
  SocketPair() {
    int fds[2];
    MUSTER_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0, "socketpair failed");
    one.reset(fds[0]);
    two.reset(fds[1]);
  }
};

/// A connected socket that sends nothing, for a test that simulates an unauthenticated peer.
inline Fd connect_raw(Loop& loop, const Address& address) {
  auto fd = start_connect(address);
  MUSTER_CHECK(fd.has_value(), fd.error().message);
  pollfd entry{fd->get(), POLLOUT, 0};
  MUSTER_CHECK(drive_until(loop, [&] { return poll(&entry, 1, 0) == 1; }), "a loopback connection took a minute");
  return std::move(*fd);
}

/// Drives the loop until the other end of `fd` closes; returns all that it sent.
inline std::string read_until_closed(Loop& loop, int fd) {
  std::string all;
  const bool closed = drive_until(loop, [&] {
    char buffer[4096];
    ssize_t n;
    while ((n = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT)) > 0) all.append(buffer, static_cast<size_t>(n));
    return n == 0 || (errno != EAGAIN && errno != EINTR);
  });
  MUSTER_CHECK(closed, "the peer did not close within a minute");
  return all;
}

/// A dial and its result.
struct Dialed {
  std::optional<Result<Connection>> result;
  std::unique_ptr<Dial> dial;
};

inline std::unique_ptr<Dialed> start_dial(Loop& loop, const Address& address, DialOptions options,
                                          const Deadline& deadline = soon()) {
  auto dialed = std::make_unique<Dialed>();
  dialed->dial = dial(loop, address, std::move(options), deadline,
                      [to = dialed.get()](Result<Connection> result) { to->result = std::move(result); });
  return dialed;
}

inline Result<Connection> dial_now(Loop& loop, const Address& address, DialOptions options,
                                   const Deadline& deadline = soon()) {
  const auto dialed = start_dial(loop, address, std::move(options), deadline);
  const auto ended = loop.run_until([&] { return dialed->result.has_value(); }, soon());
  MUSTER_CHECK(ended.has_value(), "a dial did not end within a minute");
  return std::move(*dialed->result);
}

/// An acceptor that keeps its accepted connections.
struct Server {
  std::vector<Connection> accepted;
  std::unique_ptr<Acceptor> acceptor;

  Server(Loop& loop, const Address& address, Acceptor::Options options) {
    auto made = Acceptor::create(loop, address, std::move(options),
                                 [this](Connection connection) { accepted.push_back(std::move(connection)); });
    MUSTER_CHECK(made.has_value(), made.error().message);
    acceptor = std::move(*made);
  }
  Address address() const { return acceptor->address(); }
};

/// Sends `text` through one stream and reads from the other until the same number of bytes has arrived. Returns the
/// received text.
inline std::string carry(Connection& from, Connection& to, const std::string& text) {
  std::string arrived(to.leftover.begin(), to.leftover.end());
  size_t sent = 0;
  const Deadline deadline = soon();
  while (arrived.size() < text.size()) {
    MUSTER_CHECK(!deadline.passed(), "bytes did not arrive within a minute");
    iovec out{const_cast<char*>(text.data()) + sent, text.size() - sent};
    if (out.iov_len > 0) sent += from.stream->write({&out, 1}).value();
    char buffer[10000];
    iovec in[2] = {{buffer, 100}, {buffer + 100, sizeof buffer - 100}};
    arrived.append(buffer, to.stream->read(in).value());
  }
  return arrived;
}

}  // namespace muster
