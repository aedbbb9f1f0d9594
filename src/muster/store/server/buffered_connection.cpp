#include "muster/store/server/buffered_connection.h"

#include <fmt/format.h>
#include <sys/epoll.h>

#include <utility>

namespace muster {
namespace {
constexpr int kReadsPerTurn = 16;  // after these reads, other connections get their turn

// All connections of a thread share this buffer, because each connection consumes its input before another one reads.
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
  if (continue_timer_) loop_.cancel(*continue_timer_);
  stream_.reset();  // the peer sees the end of the stream now, even if this object lives on
}

void BufferedConnection::lose(const Error& why) {
  if (!open_) return;
  close();
  handlers_.lost(why);
}

void BufferedConnection::on_event(uint32_t events) {
  hung_up_ = hung_up_ || (events & ~uint32_t{EPOLLIN | EPOLLOUT}) != 0;
  const MutableByteView buffer = read_buffer();
  for (int reads = 0; open_ && !over(); ++reads) {
    if (reads == kReadsPerTurn) {
      continue_later();  // edge-triggered epoll does not report the rest again
      break;
    }
    const iovec segment{buffer.data(), buffer.size()};
    const auto n = stream_->read({&segment, 1});
    if (!n) return lose(n.error());
    if (*n == 0) break;
    handlers_.input(buffer.first(*n));
    if (!open_) return;
    // Such a short read saves a read that would return nothing. After a hang-up the loop reads on to see the end.
    if (*n < buffer.size() && !hung_up_ && stream_->short_read_is_last()) break;
  }
  flush();
}

void BufferedConnection::continue_later() {
  if (continue_timer_) return;
  continue_timer_ = loop_.after(Duration{0}, [this] {
    continue_timer_.reset();
    if (std::exchange(input_left_, false)) handlers_.input({});
    on_event(0);
  });
}

void BufferedConnection::pause(bool paused) {
  paused_ = paused;
  input_left_ = input_left_ || paused;
  if (open_ && !over()) continue_later();
}

void BufferedConnection::flush() {
  if (!open_) return;
  input_left_ = input_left_ || over();
  if (outbox_.empty() && !input_left_) return;
  if (const auto written = outbox_.flush(*stream_); !written) return lose(written.error());
  if (over() && !paused_ && !stall_timer_) arm_stall_timer();
  update_events();
  if (open_ && input_left_ && !over()) continue_later();
}

// Asks epoll for writability only while output is left.
void BufferedConnection::update_events() {
  const uint32_t output = !outbox_.empty() && stream_->wants_write() ? uint32_t{EPOLLOUT} : 0;
  const uint32_t wanted = EPOLLIN | EPOLLRDHUP | EPOLLET | output;
  if (std::exchange(watched_, wanted) == wanted) return;
  if (const auto changed = loop_.modify(stream_->fd(), watched_); !changed) lose(changed.error());
}

void BufferedConnection::arm_stall_timer() {
  const uint64_t taken = outbox_.taken();
  stall_timer_ = loop_.after(options_.stall_timeout, [this, taken] {
    stall_timer_.reset();
    if (!over()) return;
    if (outbox_.taken() != taken) return arm_stall_timer();
    lose(Error{ErrorCode::kResourceExhausted,
               fmt::format("it has read none of {} of replies for {} ms", format_bytes(outbox_.size()),
                           options_.stall_timeout.count() / 1'000'000)});
  });
}

}  // namespace muster
