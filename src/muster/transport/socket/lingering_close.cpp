#include "muster/transport/socket/lingering_close.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <utility>

namespace muster {
namespace {

class LingeringClose {
 public:
  LingeringClose(std::unique_ptr<Stream> stream, Bytes bytes) : stream_(std::move(stream)), bytes_(std::move(bytes)) {}

  /// False when there is nothing left to do.
  bool advance() { return write() && discard(); }
  int fd() const { return stream_->fd(); }
  uint32_t interest() const { return all_sent_ ? EPOLLIN : EPOLLIN | EPOLLOUT; }
  /// True if bytes have moved since the last call.
  bool has_moved() { return std::exchange(moved_, false); }

 private:
  bool write() {
    while (sent_ < bytes_.size()) {
      const Result<size_t> written = stream_->write(ByteView(bytes_).subspan(sent_));
      if (!written) return false;
      if (*written == 0) return true;
      sent_ += *written;
      moved_ = true;
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
      moved_ = true;
    }
    return true;
  }

  std::unique_ptr<Stream> stream_;
  Bytes bytes_;
  size_t sent_ = 0;
  bool all_sent_ = false, moved_ = false;
};

// Checks once in each kLingerIdleTime.
void end_when_idle(Loop& loop, std::weak_ptr<LingeringClose> closing, int periods_left) {
  loop.after(kLingerIdleTime, [&loop, closing = std::move(closing), periods_left] {
    const auto self = closing.lock();
    if (!self) return;
    if (periods_left == 0 || !self->has_moved()) return loop.unwatch(self->fd());
    end_when_idle(loop, closing, periods_left - 1);
  });
}

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
  end_when_idle(loop, closing, kLingerTime / kLingerIdleTime);
}

}  // namespace muster
