// send_fd and receive_fd. The message is one zero byte, with one descriptor (SCM_RIGHTS) or with none.
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "muster/io/socket.h"

namespace muster {
namespace {

struct Message {
  char byte = 0;
  iovec segment{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};

  Message() {
    header.msg_iov = &segment;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = CMSG_LEN(sizeof(int));  // not CMSG_SPACE: its padding has room for a second descriptor
  }
};

Result<> wait_for(int socket, short events, const Deadline& deadline, const char* what) {
  pollfd entry{socket, events, 0};
  while (true) {
    const int n = poll(&entry, 1, deadline.poll_timeout_ms());
    if (n > 0) return {};
    if (n < 0 && errno != EINTR) return fail_errno(errno, what);
    if (deadline.passed()) return fail(ErrorCode::kTimeout, std::string(what) + ": the peer did not answer in time");
  }
}

}  // namespace

Result<> send_fd(int socket, int fd, const Deadline& deadline) {
  Message message;
  if (fd < 0) {
    message.header.msg_control = nullptr;
    message.header.msg_controllen = 0;
  } else {
    cmsghdr* control = CMSG_FIRSTHDR(&message.header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(control), &fd, sizeof fd);
  }
  while (sendmsg(socket, &message.header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EAGAIN)
      MUSTER_TRY(wait_for(socket, POLLOUT, deadline, "cannot send a descriptor"));
    else if (errno != EINTR)
      return fail_errno(errno, "cannot send a descriptor");
  }
  return {};
}

Result<Fd> receive_fd(int socket, const Deadline& deadline) {
  Message message;
  ssize_t n;
  while ((n = recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT)) < 0) {
    if (errno == EAGAIN)
      MUSTER_TRY(wait_for(socket, POLLIN, deadline, "cannot receive a descriptor"));
    else if (errno != EINTR)
      return fail_errno(errno, "cannot receive a descriptor");
  }
  if (n == 0) return fail(ErrorCode::kPeerLost, "the peer closed the connection instead of sending a descriptor");
  const cmsghdr* control = CMSG_FIRSTHDR(&message.header);
  if (control == nullptr && message.byte == 0) return Fd();
  if (control == nullptr || control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS ||
      control->cmsg_len != CMSG_LEN(sizeof(int))) {
    return fail(ErrorCode::kProtocol, "the peer sent data where a descriptor was expected");
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(control), sizeof fd);
  return Fd(fd);
}

}  // namespace muster
