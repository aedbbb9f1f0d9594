#include "muster/io/socket.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/stat.h>

#include <cerrno>
#include <climits>

namespace muster {
namespace {

void set_flag(int fd, int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof value); }

Result<Fd> open_socket(const Address& address) {
  if (address.raw_length() == 0) return fail(ErrorCode::kInvalidArgument, "an empty address cannot be used");
  Fd fd(socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return fail_errno(errno, fmt::format("cannot open a socket for {}", address.to_string()));
  if (!address.is_unix()) set_flag(fd.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  return fd;
}

bool is_path(const Address& address) {
  return address.is_unix() && !address.host().empty() && address.host().front() != '@';
}

/// True if a dead process left the file of this Unix socket: no process listens there.
bool is_stale(const Address& address) {
  struct stat status;
  if (lstat(address.host().c_str(), &status) != 0 || !S_ISSOCK(status.st_mode)) return false;
  const auto probe = open_socket(address);
  return probe && connect(probe->get(), address.raw(), address.raw_length()) != 0 && errno == ECONNREFUSED;
}

Result<> bind_to(int fd, const Address& address) {
  if (bind(fd, address.raw(), address.raw_length()) == 0) return {};
  int error = errno;
  if (error == EADDRINUSE && is_path(address) && is_stale(address)) {
    unlink(address.host().c_str());
    if (bind(fd, address.raw(), address.raw_length()) == 0) return {};
    error = errno;
  }
  return fail_errno(error, fmt::format("cannot listen on {}", address.to_string()));
}

std::string cannot_connect(const Address& address) { return fmt::format("cannot connect to {}", address.to_string()); }

}  // namespace

Result<Fd> listen_on(const Address& address) {
  MUSTER_ASSIGN(Fd fd, open_socket(address));
  if (!address.is_unix()) set_flag(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.family() == AF_INET6) set_flag(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  // bind() creates the file with the mode of the socket, so other users can never connect.
  if (is_path(address)) fchmod(fd.get(), 0600);
  MUSTER_TRY(bind_to(fd.get(), address));
  // The kernel caps the backlog to net.core.somaxconn.
  if (listen(fd.get(), INT_MAX) != 0) {
    return fail_errno(errno, fmt::format("cannot listen on {}", address.to_string()));
  }
  return fd;
}

Result<Fd> start_connect(const Address& address) {
  MUSTER_ASSIGN(Fd fd, open_socket(address));
  if (connect(fd.get(), address.raw(), address.raw_length()) == 0 || errno == EINPROGRESS || errno == EINTR) return fd;
  if (address.is_unix() && errno == EAGAIN) {
    return fail(ErrorCode::kResourceExhausted, cannot_connect(address) + ": its queue of connections is full");
  }
  if (address.is_unix() && errno == ENOENT) {
    return fail(ErrorCode::kUnavailable, cannot_connect(address) + ": no process listens there");
  }
  return fail_errno(errno, cannot_connect(address));
}

Result<> finish_connect(int fd, const Address& address) {
  int error = 0;
  socklen_t length = sizeof error;
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  if (error != 0) return fail_errno(error, cannot_connect(address));
  // TCP lets a socket connect to itself if the kernel gave it the same local port as the port that it dials.
  if (!address.is_unix()) {
    MUSTER_ASSIGN(const Address local, local_address(fd));
    if (local == address) return fail_errno(ECONNREFUSED, cannot_connect(address));
  }
  return {};
}

Result<std::optional<Fd>> accept_from(int listener, Address* peer) {
  while (true) {
    sockaddr_storage storage{};
    socklen_t length = sizeof storage;
    Fd fd(accept4(listener, reinterpret_cast<sockaddr*>(&storage), &length, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      const Address from = Address::from_raw(reinterpret_cast<const sockaddr*>(&storage), length);
      if (!from.is_unix()) set_flag(fd.get(), IPPROTO_TCP, TCP_NODELAY, 1);
      if (peer != nullptr) *peer = from;
      return fd;
    }
    if (errno == EAGAIN) return std::nullopt;
    if (errno != EINTR && errno != ECONNABORTED) return fail_errno(errno, "cannot accept a connection");
  }
}

Result<Address> local_address(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) {
    return fail_errno(errno, "cannot ask for a socket's address");
  }
  return Address::from_raw(reinterpret_cast<const sockaddr*>(&storage), length);
}

Result<UnixPeer> unix_peer(int fd) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return fail_errno(errno, "cannot get the credentials of a Unix socket's peer");
  }
  return credentials;
}

}  // namespace muster
