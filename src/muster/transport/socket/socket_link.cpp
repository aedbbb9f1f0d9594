// The frames of a link over a socket (io/frame.h). They follow the handshake; its hello is in link_hello.cpp.
//
//   kind 1 open     := nothing          the first frame of each end: it accepts the link
//   kind 2 data     := bytes[1..16 MiB] the next bytes of the stream; frame boundaries have no meaning
//   kind 3 close    := code:u8 rank:i32 phase:u8 message:string context:string
//                     why the link ends, the rank to blame, and the state of the sender's group
//   kind 4 shutdown := nothing          the link ends without a reason
//   kind 5 doorbell := nothing          only with shared memory: poll the rings
//   kind 6 ping     := nothing          asks for a pong
//   kind 7 pong     := nothing          answers a ping
//   kind 8 control  := bytes[1..64]     a control message, outside the stream
//
// Nothing follows a close or a shutdown. An end that refuses the link sends close instead of open. Other frames are
// kProtocol.
#include "muster/transport/socket/socket_link.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>

#include "muster/transport/link_base.h"
#include "muster/transport/link_listen.h"
#include "muster/transport/socket/lingering_close.h"
#include "muster/transport/socket/tcp_options.h"
#include "muster/transport/transport.h"

namespace muster {
namespace {

constexpr uint32_t kSendFrameBytes = 1u << 20;
constexpr uint32_t kMaxDataFrame = 16u << 20;
constexpr size_t kReadAheadBytes = 4096;            // a header and a control frame, or a whole short message
constexpr size_t kMaxPieces = 32;                   // per system call
constexpr size_t kMaxReadAhead = size_t{32} << 10;  // for pings that follow bytes without a receive
constexpr int kMaxPongsDue = 64;                    // more unanswered pings are a protocol error
constexpr size_t kMaxCloseSearch = size_t{64} << 20;

static_assert(kReadAheadBytes >= kFrameHeaderBytes + kMaxControlFrame);

/// It has many small functions and fields, because a write or a read may stop anywhere: in a header, a control message
/// or a payload. Each direction then continues from its fields.
class SocketLink final : public LinkBase {
 public:
  SocketLink(Loop& loop, NegotiatedLink negotiated);
  ~SocketLink() override { destroy_link(); }
  Result<> start();
  const char* kind() const override { return name(has_tcp_ ? Transport::kTcp : Transport::kUnix); }

 private:
  void pump_sends() override;
  void pump_receives() override;
  bool has_unread() const override { return payload_left_ > 0; }
  void shutdown(const Error* why) override;
  void release() override;
  void send_ping() override;
  void write_control(ByteView message) override;

  void on_event(uint32_t events);
  void update_watch();
  void check_peer();

  /// True if there are bytes to write other than payload: a ping, a pong, a control message, or the rest of a header.
  bool signalling() const { return pings_due_ + pongs_due_ > 0 || !control_due_.empty() || header_left() > 0; }
  size_t header_left() const { return header_.size() - header_sent_; }
  void begin_frame();
  bool take_signal(const FrameHeader& header, ByteView rest);
  void write_failed(const Error& error);
  Error find_close_reason(Error otherwise);

  bool use_read_ahead();
  bool read_header();
  Result<size_t> read_more(bool& more);
  bool may_scan_ahead() const {
    return !peer_closed_ && payload_left_ < kMaxReadAhead && read_ahead_size() < kMaxReadAhead;
  }
  void scan_ahead(bool& more);
  MutableByteView read_ahead_room();
  size_t read_ahead_size() const { return read_ahead_end_ - read_ahead_begin_; }
  ByteView read_ahead() const { return ByteView(read_ahead_).subspan(read_ahead_begin_, read_ahead_size()); }
  void drop_read_ahead(size_t bytes);

  Loop& loop_;
  std::unique_ptr<Stream> stream_;
  const bool has_tcp_;
  bool peer_closed_ = false;  // the peer has closed; bytes that it sent may still be unread
  uint32_t events_ = 0;       // those that the loop watches for; 0: the descriptor is not watched
  Loop::TimerId check_timer_ = 0;

  Bytes header_;  // the header of the frame that is being sent; for a control message, the whole frame
  size_t header_sent_ = 0;
  size_t frame_left_ = 0;  // bytes of its payload that are not sent
  int pings_due_ = 0, pongs_due_ = 0;
  Bytes control_due_;

  // Bytes that were read before their frame was known. A payload without a receive stays in the kernel, except for the
  // bytes that fit here.
  Bytes read_ahead_;
  size_t read_ahead_begin_ = 0, read_ahead_end_ = 0;
  size_t scanned_ = 0;       // bytes of read_ahead_ in which scan_ahead() has handled the signals; ends with a frame
  size_t payload_left_ = 0;  // of the data frame that is being received; includes its bytes in read_ahead_
  bool readable_ = false;    // true in on_event(): bytes may have arrived
};

SocketLink::SocketLink(Loop& loop, NegotiatedLink negotiated)
    : LinkBase(std::move(negotiated.peer)),
      loop_(loop),
      stream_(std::move(negotiated.connection.stream)),
      has_tcp_(!negotiated.connection.peer.is_unix()),
      read_ahead_(std::move(negotiated.connection.leftover)),
      read_ahead_end_(read_ahead_.size()) {
  read_ahead_.resize(std::max(kReadAheadBytes, read_ahead_.size()));
  watch_idle_tcp(stream_->fd());
}

/// Also reads the bytes that have arrived: TLS may have decrypted them already, and then epoll reports nothing.
Result<> SocketLink::start() {
  events_ = EPOLLIN | EPOLLRDHUP;
  MUSTER_TRY(loop_.watch(stream_->fd(), events_, [this](uint32_t events) { on_event(events); }));
  pump_receives();
  run_completions();
  return {};
}

void SocketLink::on_event(uint32_t events) {
  if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) peer_closed_ = true;
  readable_ = true;
  pump_receives();
  readable_ = false;
  if (is_open()) pump_sends();
  run_completions();
}

/// Watches only for events that lead to progress; a level-triggered loop would spin on others. Without a receive for
/// the next payload, EPOLLIN is off. EPOLLHUP cannot be switched off, so after the peer has closed, the descriptor is
/// not watched at all, and the next receive reads the remaining bytes.
void SocketLink::update_watch() {
  const bool reading = receiving() || payload_left_ == 0 || may_scan_ahead();
  uint32_t events = peer_closed_ ? 0 : uint32_t{EPOLLRDHUP};
  if (reading) events |= EPOLLIN;
  if (sending() || signalling() || (reading && stream_->wants_write())) events |= EPOLLOUT;
  Result<> changed;
  if (events == 0) {
    if (events_ != 0) loop_.unwatch(stream_->fd());
  } else if (events_ == 0) {
    changed = loop_.watch(stream_->fd(), events, [this](uint32_t what) { on_event(what); });
  } else if (events != events_) {
    changed = loop_.modify(stream_->fd(), events);
  }
  if (!changed) return end(link_error(changed.error(), peer()));
  events_ = events;
  if (has_tcp_ && sending() && check_timer_ == 0) {
    check_timer_ = loop_.after(kTcpCheckInterval, [this] { check_peer(); });
  }
}

void SocketLink::check_peer() {
  check_timer_ = 0;
  if (Result<> alive = check_tcp_peer(stream_->fd()); !alive) {
    end(link_error(alive.error(), peer()));
  } else {
    update_watch();
  }
  run_completions();
}

// ---- sending

void SocketLink::pump_sends() {
  size_t budget = kTurnBytes;
  while ((sending() || signalling()) && budget > 0) {
    if (header_left() == 0 && frame_left_ == 0) begin_frame();
    std::array<iovec, kMaxPieces> pieces;
    pieces[0] = {header_.data() + header_sent_, header_left()};
    const size_t first = header_left() > 0 ? 1 : 0;
    size_t count = first;
    if (frame_left_ > 0) count += sends_.front().describe(std::span(pieces).subspan(first), frame_left_);
    const Result<size_t> written = stream_->write(std::span(pieces).first(count));
    if (!written) return write_failed(written.error());
    if (*written == 0) break;
    const size_t of_header = std::min(*written, header_left());
    const size_t of_payload = *written - of_header;
    header_sent_ += of_header;
    if (of_payload > 0) {
      frame_left_ -= of_payload;
      sends_.front().advance(of_payload);
      complete_done(sends_);
    }
    budget -= std::min(budget, *written);
  }
  update_watch();
}

void SocketLink::begin_frame() {
  LinkFrame kind = LinkFrame::kData;
  header_sent_ = 0;
  if (!control_due_.empty()) {
    header_ = encode_frame(static_cast<uint8_t>(LinkFrame::kControl), control_due_);
    return control_due_.clear();
  }
  if (pongs_due_ > 0) {
    --pongs_due_;
    kind = LinkFrame::kPong;
  } else if (pings_due_ > 0) {
    --pings_due_;
    kind = LinkFrame::kPing;
  } else {
    frame_left_ = std::min<size_t>(sends_.front().remaining(), kSendFrameBytes);
  }
  const auto header = encode(FrameHeader{static_cast<uint32_t>(frame_left_), static_cast<uint8_t>(kind), 0});
  header_.assign(header.begin(), header.end());
}

void SocketLink::send_ping() {
  ++pings_due_;
  pump_sends();
}

void SocketLink::write_control(ByteView message) {
  control_due_.assign(message.begin(), message.end());
  pump_sends();
}

/// True if the frame of this header is a ping, a pong or a control message and is complete in `rest`. Pongs are sent in
/// the next turn of the loop.
bool SocketLink::take_signal(const FrameHeader& header, ByteView rest) {
  const auto kind = static_cast<LinkFrame>(header.kind);
  if (is_control(header)) {
    if (rest.size() < header.length) return false;
    deliver_control(rest.first(header.length));
    return true;
  }
  if (header.length > 0) return false;
  if (kind == LinkFrame::kPing && pongs_due_ < kMaxPongsDue) {
    ++pongs_due_;
  } else if (kind != LinkFrame::kPong) {
    return false;
  }
  on_pong();
  return true;
}

/// The peer has closed, and may have sent the reason after its data. The link is over, so the data may be skipped.
void SocketLink::write_failed(const Error& error) {
  pump_receives();
  if (is_open()) end(find_close_reason(link_error(error, peer())));
}

/// Skips unread data. A close frame behind it ends the link with the reason of the peer; then the returned error has no
/// effect, because end() keeps the first reason.
Error SocketLink::find_close_reason(Error otherwise) {
  Bytes waste(size_t{64} << 10);
  for (size_t searched = 0; searched < kMaxCloseSearch;) {
    const size_t skip = std::min(payload_left_, read_ahead_size());
    drop_read_ahead(skip);
    payload_left_ -= skip;
    if (payload_left_ == 0 && read_header()) continue;
    if (!is_open()) break;
    const MutableByteView skipped = MutableByteView(waste).first(std::min(payload_left_, waste.size()));
    const Result<size_t> got = stream_->read(payload_left_ > 0 ? skipped : read_ahead_room());
    if (!got || *got == 0) break;
    searched += *got;
    if (payload_left_ > 0) {
      payload_left_ -= *got;
    } else {
      read_ahead_end_ += *got;
    }
  }
  return otherwise;
}

// ---- receiving

void SocketLink::pump_receives() {
  size_t budget = kTurnBytes;
  bool more = true;
  while (is_open()) {
    if (use_read_ahead()) continue;
    if (!is_open()) return;
    const bool unwanted = payload_left_ > 0 && !receiving();
    const bool enough = budget == 0 && !stream_->has_buffered();
    if ((unwanted && !may_scan_ahead()) || enough || !more) break;
    if (unwanted) {
      scan_ahead(more);
      continue;
    }
    const Result<size_t> got = read_more(more);
    if (!got) return end(link_error(got.error(), peer()));
    budget -= std::min(budget, *got);
  }
  if (is_open()) update_watch();
}

/// Consumes bytes in read_ahead_. False if it needs more bytes, or a receive.
bool SocketLink::use_read_ahead() {
  if (payload_left_ == 0) return read_header();
  if (!receiving() || read_ahead_size() == 0) return false;
  const size_t bytes = std::min({payload_left_, read_ahead_size(), receives_.front().remaining()});
  receives_.front().copy_from(read_ahead().data(), bytes);
  complete_done(receives_);
  payload_left_ -= bytes;
  drop_read_ahead(bytes);
  return true;
}

/// True if a data frame begins, or a signal was read. A close frame or an error ends the link.
bool SocketLink::read_header() {
  if (read_ahead_size() < kFrameHeaderBytes) return false;
  const Result<FrameHeader> header = decode_frame_header(read_ahead().first(kFrameHeaderBytes), kMaxDataFrame);
  if (!header) return end(link_error(header.error(), peer())), false;
  if (header->kind == static_cast<uint8_t>(LinkFrame::kData) && header->length > 0) {
    payload_left_ = header->length;
    drop_read_ahead(kFrameHeaderBytes);
    return true;
  }
  if (take_signal(*header, read_ahead().subspan(kFrameHeaderBytes))) {
    drop_read_ahead(kFrameHeaderBytes + header->length);
    return true;
  }
  const bool small = header->length <= kMaxControlFrame;
  if (small && read_ahead_size() < kFrameHeaderBytes + header->length) return false;
  end(parse_close(*header, small ? read_ahead().subspan(kFrameHeaderBytes, header->length) : ByteView{}, peer()));
  return false;
}

void SocketLink::drop_read_ahead(size_t bytes) {
  read_ahead_begin_ += bytes;
  scanned_ -= std::min(scanned_, bytes);
  if (read_ahead_begin_ == read_ahead_end_) read_ahead_begin_ = read_ahead_end_ = 0;
}

MutableByteView SocketLink::read_ahead_room() {
  if (read_ahead_begin_ > 0) {
    std::copy(read_ahead().begin(), read_ahead().end(), read_ahead_.begin());
    read_ahead_end_ = read_ahead_size();
    read_ahead_begin_ = 0;
  }
  return MutableByteView(read_ahead_).subspan(read_ahead_end_);
}

/// Reads the rest of a payload directly into the caller's segments, and then the bytes after it into read_ahead_.
/// Returns the number of bytes. Sets `more` if there may be more to read.
Result<size_t> SocketLink::read_more(bool& more) {
  scanned_ = 0;  // bytes of the payload may land behind read_ahead_, so its scanned part ends in no frame any more
  std::array<iovec, kMaxPieces> pieces;
  size_t count = 0;
  size_t direct = 0;
  if (payload_left_ > 0) {
    count = receives_.front().describe(std::span(pieces).first(kMaxPieces - 1), payload_left_);
    for (size_t i = 0; i < count; ++i) direct += pieces[i].iov_len;
  }
  size_t wanted = direct;
  if (direct == payload_left_) {
    const MutableByteView room = read_ahead_room();
    pieces[count++] = {room.data(), room.size()};
    wanted += room.size();
  }
  MUSTER_ASSIGN(const size_t got, stream_->read(std::span(pieces).first(count)));
  more = got == wanted || stream_->has_buffered();
  const size_t landed = std::min(got, direct);
  if (landed > 0) {
    receives_.front().advance(landed);
    complete_done(receives_);
    payload_left_ -= landed;
  }
  read_ahead_end_ += got - landed;
  return got;
}

/// Handles signals that arrived after a payload without a receive: this process may wait for something else, and must
/// still answer pings. The other bytes stay. Between two receives of a busy link there is nothing to read, and all but
/// the last frames were scanned before.
void SocketLink::scan_ahead(bool& more) {
  more = readable_ || stream_->has_buffered();
  if (more) {
    if (read_ahead_size() == read_ahead_.size()) read_ahead_.resize(std::min(kMaxReadAhead, 2 * read_ahead_.size()));
    const MutableByteView room = read_ahead_room();
    const Result<size_t> got = stream_->read(room);
    if (!got) peer_closed_ = true;  // bytes before it can still be received; the next read fails again
    more = got && *got == room.size();
    read_ahead_end_ += got.value_or(0);
  }
  for (size_t& at = scanned_ = std::max(scanned_, payload_left_); at + kFrameHeaderBytes <= read_ahead_size();) {
    const Result<FrameHeader> header = decode_frame_header(read_ahead().subspan(at, kFrameHeaderBytes), kMaxDataFrame);
    if (!header) return;  // reported when the stream reaches it
    const size_t bytes = kFrameHeaderBytes + header->length;
    if (take_signal(*header, read_ahead().subspan(at + kFrameHeaderBytes))) {
      const auto signal = read_ahead_.begin() + static_cast<ptrdiff_t>(read_ahead_begin_ + at);
      std::copy(signal + static_cast<ptrdiff_t>(bytes), read_ahead_.begin() + static_cast<ptrdiff_t>(read_ahead_end_),
                signal);
      read_ahead_end_ -= bytes;
    } else if (is_control(*header)) {
      return;  // the rest of it has not arrived
    } else {
      at += bytes;
    }
  }
}

// ---- the end

/// The rest of a frame that has begun must be sent first, or the peer would read the close frame as payload.
void SocketLink::shutdown(const Error* why) {
  Bytes words(header_.begin() + static_cast<ptrdiff_t>(header_sent_), header_.end());
  words.resize(header_left() + frame_left_);
  if (frame_left_ > 0) sends_.front().copy_to(words.data() + header_left(), frame_left_);
  const Bytes close_reason = encode_close(why);
  words.insert(words.end(), close_reason.begin(), close_reason.end());
  std::unique_ptr<Stream> stream = std::move(stream_);
  loop_.unwatch(stream->fd());
  loop_.cancel(check_timer_);
  linger(loop_, std::move(stream), std::move(words));
}

void SocketLink::release() {
  loop_.unwatch(stream_->fd());
  loop_.cancel(check_timer_);
  stream_.reset();
}

LinkFactory socket_factory(Loop& loop) {
  return [&loop](NegotiatedLink negotiated) -> Result<std::unique_ptr<Link>> {
    auto link = std::make_unique<SocketLink>(loop, std::move(negotiated));
    MUSTER_TRY(link->start());
    return link;
  };
}

}  // namespace

Result<std::unique_ptr<Listener>> listen_links(Loop& loop, const Address& address, LinkIdentity self,
                                               LinkHandler handler) {
  return listen_for_links(loop, address, std::move(self), LinkHello::Wire::kSocket, socket_factory(loop),
                          std::move(handler));
}

std::unique_ptr<Dial> connect_link(Loop& loop, const Address& address, LinkIdentity self, Rank expected,
                                   const Deadline& deadline, ConnectHandler handler) {
  return dial_link(loop, address, std::move(self), LinkHello::Wire::kSocket, expected, deadline, socket_factory(loop),
                   std::move(handler));
}

}  // namespace muster
