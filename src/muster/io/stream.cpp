#include "muster/io/stream.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace muster {
namespace {

msghdr message_over(std::span<const iovec> segments) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(segments.data());  // the kernel only reads it
  message.msg_iovlen = std::min<size_t>(segments.size(), IOV_MAX);
  return message;
}

size_t total(std::span<const iovec> segments) {
  size_t bytes = 0;
  for (const auto& segment : segments) bytes += segment.iov_len;
  return bytes;
}

class PlainStream final : public Stream {
 public:
  explicit PlainStream(Fd socket) : socket_(std::move(socket)) {}

  Result<size_t> read(std::span<const iovec> into) override {
    msghdr message = message_over(into);
    while (true) {
      // One segment is the common case. recv() is cheaper for it, because the kernel reads no message header.
      const ssize_t n = into.size() == 1 ? recv(socket_.get(), into[0].iov_base, into[0].iov_len, 0)
                                         : recvmsg(socket_.get(), &message, 0);
      if (n > 0 || (n == 0 && total(into) == 0)) return static_cast<size_t>(n);
      if (n == 0) return fail(ErrorCode::kPeerLost, "the peer closed the connection");
      if (errno == EAGAIN) return 0;
      if (errno != EINTR) return fail_errno(errno, "cannot receive");
    }
  }

  Result<size_t> write(std::span<const iovec> from) override {
    const msghdr message = message_over(from);
    full_ = false;
    while (true) {
      const ssize_t n = from.size() == 1 ? send(socket_.get(), from[0].iov_base, from[0].iov_len, MSG_NOSIGNAL)
                                         : sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
      if (n >= 0) {
        full_ = static_cast<size_t>(n) < total(from);
        return static_cast<size_t>(n);
      }
      if (errno == EAGAIN) {
        full_ = true;
        return 0;
      }
      if (errno != EINTR) return fail_errno(errno, "cannot send");
    }
  }

  bool wants_write() const override { return full_; }
  int fd() const override { return socket_.get(); }
  bool short_read_is_last() const override { return true; }

 private:
  Fd socket_;
  bool full_ = false;
};

}  // namespace

std::unique_ptr<Stream> plain_stream(Fd socket) { return std::make_unique<PlainStream>(std::move(socket)); }

}  // namespace muster
