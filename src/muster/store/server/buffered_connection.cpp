#include "muster/store/server/buffered_connection.h"

#include <fmt/format.h>
#include <sys/epoll.h>

#include <utility>

namespace muster {
namespace {
constexpr int kReadsPerTurn = 16;  // then others get their turn

// One for all channels of a thread: what it holds is handed on before another one reads.
MutableByteView read_buffer() {
  thread_local Bytes buffer(Stream::kReadBytes);
  return buffer;
}
}  // namespace

BufferedConnection::BufferedConnection(Loop& loop, std::unique_ptr<Stream> stream, Options options, Handlers handlers)
    : loop_(loop), stream_(std::move(stream)), options_(options), handlers_(std::move(handlers)) {}

BufferedConnection::~BufferedConnection() { close(); }

Result<> BufferedConnection::start() {
  watched_ = EPOLLIN | EPOLLRDHUP | EPOLLET;
  MUSTER_TRY(loop_.watch(stream_->fd(), watched_, [this](uint32_t events) { on_event(events); }));
  open_ = true;
  return {};
}

void BufferedConnection::close() {
  if (!std::exchange(open_, false)) return;
  loop_.unwatch(stream_->fd());
  if (stall_timer_) loop_.cancel(*stall_timer_);
  if (again_timer_) loop_.cancel(*again_timer_);
  stream_.reset();  // the peer learns of it now, though this object may stay
}

void BufferedConnection::lose(const Error& why) {
  if (!open_) return;
  close();
  handlers_.lost(why);
}

void BufferedConnection::on_event(uint32_t events) {
  ending_ = ending_ || (events & ~uint32_t{EPOLLIN | EPOLLOUT}) != 0;
  const MutableByteView buffer = read_buffer();
  for (int reads = 0; open_ && !over(); ++reads) {
    if (reads == kReadsPerTurn) {
      go_on_later();  // epoll tells of the rest only once
      break;
    }
    const iovec segment{buffer.data(), buffer.size()};
    const auto n = stream_->read({&segment, 1});
    if (!n) return lose(n.error());
    if (*n == 0) break;
    handlers_.input(buffer.first(*n));
    if (!open_) return;
    if (*n < buffer.size() && !ending_ && stream_->short_read_is_last()) break;
  }
  flush();
}

void BufferedConnection::go_on_later() {
  if (again_timer_) return;
  again_timer_ = loop_.after(Duration{0}, [this] {
    again_timer_.reset();
    if (std::exchange(held_up_, false)) handlers_.input({});
    on_event(0);
  });
}

void BufferedConnection::pause(bool paused) {
  paused_ = paused;
  held_up_ = held_up_ || paused;
  if (open_ && !over()) go_on_later();
}

void BufferedConnection::flush() {
  if (!open_) return;
  held_up_ = held_up_ || over();
  if (outbox_.empty() && !held_up_) return;
  if (const auto written = outbox_.flush(*stream_); !written) return lose(written.error());
  if (over() && !paused_ && !stall_timer_) look_for_progress();
  update_watch();
  if (open_ && held_up_ && !over()) go_on_later();
}

// Room to write is asked for only while something is left to send.
void BufferedConnection::update_watch() {
  const uint32_t output = !outbox_.empty() && stream_->wants_write() ? uint32_t{EPOLLOUT} : 0;
  const uint32_t wanted = EPOLLIN | EPOLLRDHUP | EPOLLET | output;
  if (std::exchange(watched_, wanted) == wanted) return;
  if (const auto changed = loop_.modify(stream_->fd(), watched_); !changed) lose(changed.error());
}

void BufferedConnection::look_for_progress() {
  const uint64_t taken = outbox_.taken();
  stall_timer_ = loop_.after(options_.stall_timeout, [this, taken] {
    stall_timer_.reset();
    if (!over()) return;
    if (outbox_.taken() != taken) return look_for_progress();
    lose(Error{ErrorCode::kResourceExhausted,
               fmt::format("it left {} of replies unread for {} ms", format_bytes(outbox_.size()),
                           options_.stall_timeout.count() / 1'000'000),
               kNoRank,
               {}});
  });
}

}  // namespace muster
