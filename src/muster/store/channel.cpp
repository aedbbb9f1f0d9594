#include "muster/store/channel.h"

#include <fmt/format.h>
#include <sys/epoll.h>

#include <utility>

namespace muster {
namespace {
constexpr size_t kReadBytes = 64 << 10;
constexpr int kReadsPerTurn = 16;  // then others get their turn
}  // namespace

Channel::Channel(Loop& loop, std::unique_ptr<Stream> stream, Options options, Handlers handlers)
    : loop_(loop), stream_(std::move(stream)), options_(options), handlers_(std::move(handlers)), buffer_(kReadBytes) {}

Channel::~Channel() { close(); }

Result<> Channel::start() {
  watched_ = EPOLLIN;
  MUSTER_TRY(loop_.watch(stream_->fd(), watched_, [this](uint32_t) { on_event(); }));
  open_ = true;
  return {};
}

void Channel::close() {
  if (!std::exchange(open_, false)) return;
  loop_.unwatch(stream_->fd());
  if (stall_timer_) loop_.cancel(*stall_timer_);
  if (again_timer_) loop_.cancel(*again_timer_);
}

void Channel::lose(const Error& why) {
  if (!open_) return;
  close();
  handlers_.lost(why);
}

void Channel::on_event() {
  for (int reads = 0; open_ && !over(); ++reads) {
    if (reads == kReadsPerTurn) {
      const auto go_on = [this] {
        again_timer_.reset();
        on_event();
      };
      if (stream_->has_buffered() && !again_timer_) again_timer_ = loop_.after(Duration{0}, go_on);
      break;
    }
    const iovec segment{buffer_.data(), buffer_.size()};
    const auto n = stream_->read({&segment, 1});
    if (!n) return lose(n.error());
    if (*n == 0) break;
    handlers_.input(ByteView(buffer_).first(*n));
  }
  flush();
}

void Channel::flush() {
  if (!open_) return;
  held_up_ = held_up_ || over();
  if (const auto written = outbox_.flush(*stream_); !written) return lose(written.error());
  if (over() && !stall_timer_) look_for_progress();
  update_watch();
  if (!held_up_ || over() || again_timer_) return;
  again_timer_ = loop_.after(Duration{0}, [this] {
    again_timer_.reset();
    held_up_ = false;
    handlers_.input({});
    on_event();
  });
}

void Channel::update_watch() {
  const uint32_t input = over() ? 0 : uint32_t{EPOLLIN};
  const uint32_t output = !outbox_.empty() && stream_->wants_write() ? uint32_t{EPOLLOUT} : 0;
  if (std::exchange(watched_, input | output) == watched_) return;
  if (const auto changed = loop_.modify(stream_->fd(), watched_); !changed) lose(changed.error());
}

void Channel::look_for_progress() {
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
