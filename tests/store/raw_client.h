#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "muster/io/fd.h"
#include "store/test_server.h"

namespace muster {

/// Sends `words` repeatedly until the other end has closed. False after a minute.
inline bool is_cut_off(int fd, ByteView words) {
  const Deadline deadline = test_deadline();
  while (!deadline.passed()) {
    const ssize_t sent = ::send(fd, words.data(), words.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno != EAGAIN) return true;
    pollfd poll{fd, 0, 0};
    (void)::poll(&poll, 1, 10);
  }
  return false;
}

/// A blocking socket that sends any bytes that a test wants.
class RawClient {
 public:
  explicit RawClient(const Address& address) : fd_(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    EXPECT_EQ(connect(fd_.get(), address.raw(), address.raw_length()), 0);
    const timeval limit{60, 0};
    setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }
  void send(ByteView bytes) {
    EXPECT_EQ(::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), std::ssize(bytes));
  }
  /// False if the server has closed the connection.
  bool try_send(ByteView bytes) {
    return ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == std::ssize(bytes);
  }
  /// Returns fewer bytes if the server closes the connection before.
  Bytes try_receive(size_t count) {
    Bytes bytes(count);
    bytes.resize(static_cast<size_t>(std::max<ssize_t>(recv(fd_.get(), bytes.data(), count, MSG_WAITALL), 0)));
    return bytes;
  }
  void send_hex(std::string_view hex) { send(*from_hex(hex)); }
  Bytes receive(size_t count) {
    Bytes bytes(count);
    EXPECT_EQ(recv(fd_.get(), bytes.data(), count, MSG_WAITALL), std::ssize(bytes));
    return bytes;
  }
  /// Reads until the server closes the connection. False if the server sends nothing for a minute.
  bool is_closed() {
    Bytes bytes(64 << 10);
    ssize_t n = 1;
    while (n > 0) n = recv(fd_.get(), bytes.data(), bytes.size(), 0);
    return n == 0 || errno == ECONNRESET;
  }
  /// Sends `bytes` repeatedly, up to `up_to` bytes in all. True if the server closes the connection before.
  bool send_is_refused(ByteView bytes, size_t up_to) {
    for (size_t sent = 0; sent < up_to; sent += bytes.size()) {
      if (::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) return true;
    }
    return false;
  }

 private:
  Fd fd_;
};

inline constexpr std::string_view kTorchHello = "00cef7853c0d01000000";  // validate and ping
inline RawClient torch_client(const Address& address) {
  RawClient client(address);
  client.send_hex(kTorchHello);
  EXPECT_EQ(client.receive(4), (Bytes{1, 0, 0, 0}));
  return client;
}

inline RawClient torch_client(const TestServer& server) { return torch_client(server.torch_address()); }

}  // namespace muster
