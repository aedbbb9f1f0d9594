#include "muster/transport/socket/lingering_close.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>

namespace muster {
namespace {

class LingeringClose {
 public:
  LingeringClose(std::unique_ptr<Stream> stream, Bytes bytes) : stream_(std::move(stream)), bytes_(std::move(bytes)) {}

  /// False when there is nothing left to do.
  bool advance() { return write() && discard(); }
  int fd() const { return stream_->fd(); }
  uint32_t interest() const { return all_sent_ ? EPOLLIN : EPOLLIN | EPOLLOUT; }

 private:
  bool write() {
    while (sent_ < bytes_.size()) {
      const Result<size_t> written = stream_->write(ByteView(bytes_).subspan(sent_));
      if (!written) return false;
      if (*written == 0) return true;
      sent_ += *written;
    }
    if (!all_sent_) shutdown(fd(), SHUT_WR);
    all_sent_ = true;
    return true;
  }

  bool discard() {
    static constexpr int kReadsPerTurn = 64;
    std::array<uint8_t, 16384> waste;
    for (int i = 0; i < kReadsPerTurn; ++i) {
      const Result<size_t> got = stream_->read(waste);
      if (!got) return false;
      if (*got == 0) break;
    }
    return true;
  }

  std::unique_ptr<Stream> stream_;
  Bytes bytes_;
  size_t sent_ = 0;
  bool all_sent_ = false;
};

}  // namespace

void linger(Loop& loop, std::unique_ptr<Stream> stream, Bytes final_bytes) {
  // Shared by the watch, which owns it, and the handler that is running when the watch is dropped.
  const auto closing = std::make_shared<LingeringClose>(std::move(stream), std::move(final_bytes));
  if (!closing->advance()) return;
  const auto watched = loop.watch(closing->fd(), closing->interest(), [closing, &loop](uint32_t) {
    const auto self = closing;
    if (!self->advance()) return loop.unwatch(self->fd());
    (void)loop.modify(self->fd(), self->interest());
  });
  if (!watched) return;
  loop.after(kLingerTime, [weak = std::weak_ptr(closing), &loop] {
    if (const auto self = weak.lock()) loop.unwatch(self->fd());
  });
}

}  // namespace muster
