// The wire of a link over a socket: muster frames (io/frame.h), after the handshake whose hello is in hello.cpp.
//
//   kind 1 open     := nothing          each end once, first: it agrees to be the link's end
//   kind 2 data     := bytes[1..16 MiB] the next bytes of the stream; where they are cut means nothing
//   kind 3 close    := code:u8 rank:i32 phase:u8 message:string context:string
//                     why the link ends: the rank to blame, and how far the sender had come with its group
//   kind 4 goodbye  := nothing          the link ends without a reason
//   kind 5 doorbell := nothing          only beside shared memory: look at the rings
//   kind 6 ping     := nothing          asks for a pong
//   kind 7 pong     := nothing          answers a ping
//   kind 8 note     := bytes[1..64]     beside the stream, for the peer's owner
//
// Nothing follows a close or a goodbye. An end that disagrees sends close instead of open. Anything else is kProtocol.
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

constexpr uint32_t kSendFrame = 1u << 20;
constexpr uint32_t kLargestData = 16u << 20;
constexpr size_t kAheadBytes = 4096;             // a header and a control frame, or a short message whole
constexpr size_t kPieces = 32;                   // per system call
constexpr size_t kLookAhead = size_t{32} << 10;  // how far pings are looked for behind what nobody receives yet
constexpr int kMostSignals = 64;                 // unanswered by a sane peer
constexpr size_t kFarewellSearch = size_t{64} << 20;

static_assert(kAheadBytes >= kFrameHeaderBytes + kMaxControlFrame);

class SocketLink final : public LinkBase {
 public:
  SocketLink(Loop& loop, NegotiatedLink opened, const char* kind);
  ~SocketLink() override { destroy_pending(); }
  Result<> start();
  const char* kind() const override { return kind_; }

 private:
  void pump_sends() override;
  void pump_receives() override;
  bool has_unread() const override { return payload_left_ > 0; }
  void shutdown(const Error* why) override;
  void release() override;
  void send_ping() override;
  void write_control(ByteView note) override;

  void on_event(uint32_t events);
  void update_watch();
  void check_peer();

  /// Something to write beside the payload: a ping, a pong, a note, or the rest of a header.
  bool signalling() const { return pings_due_ + pongs_due_ > 0 || !note_due_.empty() || header_left() > 0; }
  size_t header_left() const { return header_.size() - header_sent_; }
  void begin_frame();
  bool take_signal(const FrameHeader& header, ByteView rest);
  void write_failed(const Error& error);
  Error find_farewell(Error otherwise);

  bool use_ahead();
  bool read_header();
  Result<size_t> read_more(bool& more);
  bool may_look_ahead() const { return !gone_ && payload_left_ < kLookAhead && ahead_size() < kLookAhead; }
  void look_ahead(bool& more);
  iovec ahead_room();
  size_t ahead_size() const { return ahead_end_ - ahead_begin_; }
  ByteView ahead() const { return ByteView(ahead_).subspan(ahead_begin_, ahead_size()); }
  void take_ahead(size_t bytes);

  Loop& loop_;
  std::unique_ptr<Stream> stream_;
  const char* const kind_;
  const bool has_tcp_;
  bool watched_ = false;
  bool gone_ = false;  // the peer has closed; what it sent may still be unread
  uint32_t events_ = 0;
  Loop::TimerId check_timer_ = 0;

  Bytes header_;  // of the frame that is being sent; a note is there whole
  size_t header_sent_ = 0;
  size_t frame_left_ = 0;  // payload of it that has not gone
  int pings_due_ = 0, pongs_due_ = 0;
  Bytes note_due_;

  // What was read before it was known what it is. A payload that nobody has asked for stays in the kernel, but for what
  // fits in here.
  Bytes ahead_;
  size_t ahead_begin_ = 0, ahead_end_ = 0;
  size_t payload_left_ = 0;  // of the data frame that is being received, what is in ahead_ included
};

SocketLink::SocketLink(Loop& loop, NegotiatedLink opened, const char* kind)
    : LinkBase(std::move(opened.peer)),
      loop_(loop),
      stream_(std::move(opened.connection.stream)),
      kind_(kind),
      has_tcp_(!opened.connection.peer.is_unix()),
      ahead_(std::move(opened.connection.leftover)),
      ahead_end_(ahead_.size()) {
  ahead_.resize(std::max(kAheadBytes, ahead_.size()));
  watch_idle_tcp(stream_->fd());
}

/// Also looks at what is there already: TLS may have decrypted it, and then epoll says nothing.
Result<> SocketLink::start() {
  events_ = EPOLLIN | EPOLLRDHUP;
  MUSTER_TRY(loop_.watch(stream_->fd(), events_, [this](uint32_t events) { on_event(events); }));
  watched_ = true;
  pump_receives();
  run_completions();
  return {};
}

void SocketLink::on_event(uint32_t events) {
  if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) gone_ = true;
  pump_receives();
  if (is_open()) pump_sends();
  run_completions();
}

/// Asks only for what leads to progress, or a level-triggered loop would spin. A payload that nobody receives yet
/// silences EPOLLIN; once the peer has closed, EPOLLHUP cannot be silenced but by not watching at all, and what there
/// is to read will be found by the next receive.
void SocketLink::update_watch() {
  const bool reading = receiving() || payload_left_ == 0 || may_look_ahead();
  uint32_t events = gone_ ? 0 : uint32_t{EPOLLRDHUP};
  if (reading) events |= EPOLLIN;
  if (sending() || signalling() || (reading && stream_->wants_write())) events |= EPOLLOUT;
  if (events == 0) {
    if (watched_) loop_.unwatch(stream_->fd());
    watched_ = false;
    return;
  }
  Result<> changed;
  if (!watched_) {
    changed = loop_.watch(stream_->fd(), events, [this](uint32_t what) { on_event(what); });
  } else if (events != events_) {
    changed = loop_.modify(stream_->fd(), events);
  }
  if (!changed) return end(link_error(changed.error(), peer()));
  watched_ = true;
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
    std::array<iovec, kPieces> pieces;
    pieces[0] = {header_.data() + header_sent_, header_left()};
    const size_t first = header_left() > 0 ? 1 : 0;
    size_t count = first;
    if (frame_left_ > 0) count += next_send().describe(std::span(pieces).subspan(first), frame_left_);
    const Result<size_t> written = stream_->write(std::span(pieces).first(count));
    if (!written) return write_failed(written.error());
    if (*written == 0) break;
    const size_t of_header = std::min(*written, header_left());
    const size_t of_payload = *written - of_header;
    header_sent_ += of_header;
    if (of_payload > 0) {
      frame_left_ -= of_payload;
      next_send().advance(of_payload);
      moved_send();
    }
    budget -= std::min(budget, *written);
  }
  update_watch();
}

void SocketLink::begin_frame() {
  LinkFrame kind = LinkFrame::kData;
  header_sent_ = 0;
  if (!note_due_.empty()) {
    header_ = encode_frame(static_cast<uint8_t>(LinkFrame::kNote), note_due_);
    return note_due_.clear();
  }
  if (pongs_due_ > 0) {
    --pongs_due_;
    kind = LinkFrame::kPong;
  } else if (pings_due_ > 0) {
    --pings_due_;
    kind = LinkFrame::kPing;
  } else {
    frame_left_ = std::min<size_t>(next_send().remaining(), kSendFrame);
  }
  const auto header = encode(FrameHeader{static_cast<uint32_t>(frame_left_), static_cast<uint8_t>(kind), 0});
  header_.assign(header.begin(), header.end());
}

void SocketLink::send_ping() {
  ++pings_due_;
  pump_sends();
}

void SocketLink::write_control(ByteView note) {
  note_due_.assign(note.begin(), note.end());
  pump_sends();
}

/// True when the frame of this header, which `rest` follows, was a signal and is there whole. Pongs go out with the
/// next turn of the loop.
bool SocketLink::take_signal(const FrameHeader& header, ByteView rest) {
  const auto kind = static_cast<LinkFrame>(header.kind);
  if (is_note(header)) {
    if (rest.size() < header.length) return false;
    deliver_control(rest.first(header.length));
    return true;
  }
  if (header.length > 0) return false;
  if (kind == LinkFrame::kPing && pongs_due_ < kMostSignals) {
    ++pongs_due_;
  } else if (kind != LinkFrame::kPong) {
    return false;
  }
  on_pong();
  return true;
}

/// The peer has closed, and may have left the reason behind what it sent: the link is over, so that may be skipped.
void SocketLink::write_failed(const Error& error) {
  pump_receives();
  if (is_open()) end(find_farewell(link_error(error, peer())));
}

Error SocketLink::find_farewell(Error otherwise) {
  Bytes waste(size_t{64} << 10);
  for (size_t searched = 0; searched < kFarewellSearch;) {
    const size_t skip = std::min(payload_left_, ahead_size());
    take_ahead(skip);
    payload_left_ -= skip;
    if (payload_left_ == 0 && read_header()) continue;
    if (!is_open()) break;
    const iovec piece = payload_left_ > 0 ? iovec{waste.data(), std::min(payload_left_, waste.size())} : ahead_room();
    const Result<size_t> got = stream_->read({&piece, 1});
    if (!got || *got == 0) break;
    searched += *got;
    if (payload_left_ > 0) {
      payload_left_ -= *got;
    } else {
      ahead_end_ += *got;
    }
  }
  return otherwise;
}

// ---- receiving

void SocketLink::pump_receives() {
  size_t budget = kTurnBytes;
  bool more = true;
  while (is_open()) {
    if (use_ahead()) continue;
    if (!is_open()) return;
    const bool unwanted = payload_left_ > 0 && !receiving();
    const bool enough = budget == 0 && !stream_->has_buffered();
    if ((unwanted && !may_look_ahead()) || enough || !more) break;
    if (unwanted) {
      look_ahead(more);
      continue;
    }
    const Result<size_t> got = read_more(more);
    if (!got) return end(link_error(got.error(), peer()));
    budget -= std::min(budget, *got);
  }
  if (is_open()) update_watch();
}

/// Makes something of the bytes in ahead_; false when it needs more, or a receive.
bool SocketLink::use_ahead() {
  if (payload_left_ == 0) return read_header();
  if (!receiving() || ahead_size() == 0) return false;
  const size_t bytes = std::min({payload_left_, ahead_size(), next_receive().remaining()});
  next_receive().copy_from(ahead().data(), bytes);
  moved_receive();
  payload_left_ -= bytes;
  take_ahead(bytes);
  return true;
}

/// True when a data frame begins, or a signal was read. A farewell or an error ends the link.
bool SocketLink::read_header() {
  if (ahead_size() < kFrameHeaderBytes) return false;
  const Result<FrameHeader> header = decode_frame_header(ahead().first(kFrameHeaderBytes), kLargestData);
  if (!header) return end(link_error(header.error(), peer())), false;
  if (header->kind == static_cast<uint8_t>(LinkFrame::kData) && header->length > 0) {
    payload_left_ = header->length;
    take_ahead(kFrameHeaderBytes);
    return true;
  }
  if (take_signal(*header, ahead().subspan(kFrameHeaderBytes))) {
    take_ahead(kFrameHeaderBytes + header->length);
    return true;
  }
  const bool small = header->length <= kMaxControlFrame;
  if (small && ahead_size() < kFrameHeaderBytes + header->length) return false;
  end(parse_farewell(*header, small ? ahead().subspan(kFrameHeaderBytes, header->length) : ByteView{}, peer()));
  return false;
}

void SocketLink::take_ahead(size_t bytes) {
  ahead_begin_ += bytes;
  if (ahead_begin_ == ahead_end_) ahead_begin_ = ahead_end_ = 0;
}

iovec SocketLink::ahead_room() {
  if (ahead_begin_ > 0) {
    std::copy(ahead().begin(), ahead().end(), ahead_.begin());
    ahead_end_ = ahead_size();
    ahead_begin_ = 0;
  }
  return {ahead_.data() + ahead_end_, ahead_.size() - ahead_end_};
}

/// Reads the rest of a payload straight into the caller's segments, and then what follows it into ahead_. Returns the
/// number of bytes; sets `more` to whether there may be more to read.
Result<size_t> SocketLink::read_more(bool& more) {
  std::array<iovec, kPieces> pieces;
  size_t count = 0;
  size_t direct = 0;
  if (payload_left_ > 0) {
    count = next_receive().describe(std::span(pieces).first(kPieces - 1), payload_left_);
    for (size_t i = 0; i < count; ++i) direct += pieces[i].iov_len;
  }
  size_t wanted = direct;
  if (direct == payload_left_) {
    pieces[count] = ahead_room();
    wanted += pieces[count++].iov_len;
  }
  MUSTER_ASSIGN(const size_t got, stream_->read(std::span(pieces).first(count)));
  more = got == wanted || stream_->has_buffered();
  const size_t landed = std::min(got, direct);
  if (landed > 0) {
    next_receive().advance(landed);
    moved_receive();
    payload_left_ -= landed;
  }
  ahead_end_ += got - landed;
  return got;
}

/// Takes the signals that came behind a payload which nobody receives yet: a peer that waits for something else must
/// still show that it is alive. The bytes stay as they are.
void SocketLink::look_ahead(bool& more) {
  if (ahead_size() == ahead_.size()) ahead_.resize(std::min(kLookAhead, 2 * ahead_.size()));
  const iovec room = ahead_room();
  const Result<size_t> got = stream_->read({&room, 1});
  if (!got) gone_ = true;  // what it sent before can still be received; the next read says this again
  more = got && *got == room.iov_len;
  ahead_end_ += got.value_or(0);
  for (size_t at = payload_left_; at + kFrameHeaderBytes <= ahead_size();) {
    const Result<FrameHeader> header = decode_frame_header(ahead().subspan(at, kFrameHeaderBytes), kLargestData);
    if (!header) return;  // to be reported in its turn
    const size_t bytes = kFrameHeaderBytes + header->length;
    if (take_signal(*header, ahead().subspan(at + kFrameHeaderBytes))) {
      const auto signal = ahead_.begin() + static_cast<ptrdiff_t>(ahead_begin_ + at);
      std::copy(signal + static_cast<ptrdiff_t>(bytes), ahead_.begin() + static_cast<ptrdiff_t>(ahead_end_), signal);
      ahead_end_ -= bytes;
    } else {
      at += bytes;
    }
  }
}

// ---- the end

/// What is left of a frame that has begun must go first, or the farewell could not be told from the payload.
void SocketLink::shutdown(const Error* why) {
  Bytes words(header_.begin() + static_cast<ptrdiff_t>(header_sent_), header_.end());
  words.resize(header_left() + frame_left_);
  if (frame_left_ > 0) next_send().copy_to(words.data() + header_left(), frame_left_);
  const Bytes farewell = encode_farewell(why);
  words.insert(words.end(), farewell.begin(), farewell.end());
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

Result<std::unique_ptr<Link>> make_socket_link(Loop& loop, NegotiatedLink opened, const char* kind) {
  auto link = std::make_unique<SocketLink>(loop, std::move(opened), kind);
  MUSTER_TRY(link->start());
  return link;
}

LinkFactory socket_factory(const Address& address) {
  const char* kind = name(address.is_unix() ? Transport::kUnix : Transport::kTcp);
  return [kind](Loop& loop, NegotiatedLink opened) { return make_socket_link(loop, std::move(opened), kind); };
}

}  // namespace

Result<std::unique_ptr<Listener>> listen_links(Loop& loop, const Address& address, LinkIdentity self,
                                               LinkHandler handler) {
  return listen_for_links(loop, address, std::move(self), LinkHello::Wire::kSocket, socket_factory(address),
                          std::move(handler));
}

std::unique_ptr<Dial> connect_link(Loop& loop, const Address& address, LinkIdentity self, Rank expected,
                                   const Deadline& deadline, ConnectHandler handler) {
  return dial_link(loop, address, std::move(self), LinkHello::Wire::kSocket, expected, deadline,
                   socket_factory(address), std::move(handler));
}

}  // namespace muster
