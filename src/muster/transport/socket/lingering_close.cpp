#include "muster/transport/socket/lingering_close.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>

namespace muster {
namespace {

class Parting {
 public:
  Parting(Loop& loop, std::unique_ptr<Stream> stream, Bytes words)
      : loop_(loop), stream_(std::move(stream)), words_(std::move(words)) {}

  /// False when there is nothing left to do.
  bool advance() { return write() && discard(); }
  int fd() const { return stream_->fd(); }
  uint32_t interest() const { return said_ ? EPOLLIN : EPOLLIN | EPOLLOUT; }
  void forget() { loop_.unwatch(fd()); }  // the watch owns this

 private:
  bool write() {
    while (gone_ < words_.size()) {
      const iovec piece{words_.data() + gone_, words_.size() - gone_};
      const Result<size_t> written = stream_->write({&piece, 1});
      if (!written) return false;
      if (*written == 0) return true;
      gone_ += *written;
    }
    if (!said_) shutdown(fd(), SHUT_WR);
    said_ = true;
    return true;
  }

  bool discard() {
    static constexpr int kReadsPerTurn = 64;
    std::array<uint8_t, 16384> waste;
    for (int i = 0; i < kReadsPerTurn; ++i) {
      const iovec piece{waste.data(), waste.size()};
      const Result<size_t> got = stream_->read({&piece, 1});
      if (!got) return false;
      if (*got == 0) break;
    }
    return true;
  }

  Loop& loop_;
  std::unique_ptr<Stream> stream_;
  Bytes words_;
  size_t gone_ = 0;
  bool said_ = false;
};

}  // namespace

void linger(Loop& loop, std::unique_ptr<Stream> stream, Bytes last_words) {
  // Shared by the watch, which owns it, and the handler that is running when the watch is dropped.
  const auto parting = std::make_shared<Parting>(loop, std::move(stream), std::move(last_words));
  if (!parting->advance()) return;
  const auto watched = loop.watch(parting->fd(), parting->interest(), [parting, &loop](uint32_t) {
    const auto self = parting;
    if (!self->advance()) return self->forget();
    (void)loop.modify(self->fd(), self->interest());
  });
  if (!watched) return;
  loop.after(kLingerTime, [weak = std::weak_ptr(parting)] {
    if (const auto self = weak.lock()) self->forget();
  });
}

}  // namespace muster
