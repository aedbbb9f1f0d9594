// A link through shared memory. The Unix socket carries the frames of socket_link.cpp, without data:
//
//   connector: handshake, open, then one byte with the memfd of two rings (SCM_RIGHTS); ring 0 carries its bytes
//   acceptor:  handshake, open; ring 1 carries its bytes
//   both:      doorbells for an end that sleeps, pings, pongs, control messages, and close or shutdown at the end
//
// Bytes that were written to a ring before the socket ended the link can still be read.
#include "muster/transport/shm/shm_link.h"

#include <sys/epoll.h>

#include <array>

#include "muster/base/wait_policy.h"
#include "muster/io/socket.h"
#include "muster/shm/cpu_migrator.h"
#include "muster/transport/link_base.h"
#include "muster/transport/link_listen.h"
#include "muster/transport/shm/ring.h"
#include "muster/transport/socket/lingering_close.h"
#include "muster/transport/transport.h"

namespace muster {
namespace {

constexpr Duration kDescriptorTimeout = std::chrono::milliseconds(100);

/// Of its many private functions, seven implement LinkBase; the others are the steps of setting up, pumping and
/// waiting.
class ShmLink final : public LinkBase {
 public:
  ShmLink(Loop& loop, NegotiatedLink negotiated)
      : LinkBase(std::move(negotiated.peer)),
        loop_(loop),
        stream_(std::move(negotiated.connection.stream)),
        frames_(kMaxControlFrame) {
    frames_.feed(negotiated.connection.leftover);
  }
  ~ShmLink() override { destroy_link(); }
  const char* kind() const override { return name(Transport::kShm); }

  Result<> start() {
    return loop_.watch(stream_->fd(), EPOLLIN, [this](uint32_t) { on_event(); });
  }

  Result<> offer_region() {
    Fd fd;
    MUSTER_ASSIGN(RingRegion region, RingRegion::create(fd));
    MUSTER_TRY(send_fd(stream_->fd(), fd.get(), Deadline::after(kDescriptorTimeout)));
    rings_.emplace(std::move(region), 0);
    return {};
  }

 private:
  struct Rings {
    Rings(RingRegion mapped, int own) : region(std::move(mapped)), out(region, own), in(region, 1 - own) {}
    RingRegion region;
    RingWriter out;
    RingReader in;
  };

  // ---- the rings

  /// A new send. While this thread polls, it soon finds the answer, so the peer need not ring a doorbell.
  void pump_sends() override {
    if (poller_ == 0 && rings_ && loop_.is_polled()) stay_awake();
    move_sends();
  }
  void move_sends() { pump(sends_, &Rings::out); }
  void pump_receives() override { pump(receives_, &Rings::in); }
  bool has_unread() const override { return rings_ && rings_->in.has_bytes(); }

  /// Moves bytes between the operations and one end of a ring, as many as one turn allows.
  template <class End>
  void pump(Fifo<Transfer>& operations, End Rings::*ring) {
    for (size_t budget = kTurnBytes; rings_ && !operations.empty() && budget > 0;) {
      End& own_end = (*rings_).*ring;
      const Result<size_t> moved = own_end.move(operations.front());
      if (!moved) return end(link_error(moved.error(), peer()));
      if (*moved == 0) break;
      moved_ = true;
      spin_.restart();
      budget -= std::min(budget, *moved);
      complete_done(operations);
      if (own_end.claim_wake()) {
        loop_.yield_soon();
        signal(LinkFrame::kDoorbell);
      }
    }
    update_polling();
  }

  // ---- waiting

  /// Starts to poll the rings if an operation is pending. When its spin is over, poll() parks.
  void update_polling() {
    if (!rings_ || (!sending() && !receiving())) return stop_polling();
    const bool asleep = (!sending() || rings_->out.parked()) && (!receiving() || rings_->in.parked());
    if (poller_ != 0 || asleep) return;
    spin_.restart();
    const auto rest = [this] {
      park();
      run_completions();
    };
    poller_ = loop_.add_poller([this] { return poll(); }, rest);
  }

  /// True if bytes moved. A callback may destroy the link.
  bool poll() {
    moved_ = false;
    pump_receives();
    if (moved_ && rings_ && core_.is_shared_with(rings_->in.writer_core())) leave_core();
    if (is_open()) move_sends();
    if (is_open() && poller_ != 0 && !moved_ && spin_.is_over(loop_.clock().now())) {
      spin_.park();
      park();
    }
    const bool moved = moved_;
    run_completions();
    return moved;
  }

  void stay_awake() {
    rings_->in.park(false);
    rings_->out.park(false);
  }

  void park() {
    rings_->in.park(receiving());
    rings_->out.park(sending());
    loop_.remove_poller(std::exchange(poller_, 0));
    moved_ = false;
    pump_receives();  // bytes that arrived before the writer saw the flag
    if (is_open()) move_sends();
  }

  /// Migrates away from the writer's core. Withdraws the own core number first: the other end runs as soon as this
  /// thread is gone, and would follow it if it still saw the old number.
  void leave_core() {
    rings_->out.forget_core();
    const std::array<uint32_t, 1> taken{rings_->in.writer_core()};
    core_.migrate_away(taken);
  }

  void stop_polling() {
    if (poller_ != 0) loop_.remove_poller(std::exchange(poller_, 0));
    if (rings_) stay_awake();
  }

  // ---- the socket

  void on_event() {
    if (Result<> read = read_socket(); !read) {
      loop_.unwatch(stream_->fd());
      begin_drain(link_error(read.error(), peer()));
    }
    if (is_open() && rings_) {
      spin_.wake(loop_.clock().now());
      stay_awake();
      core_.forget();
      pump_receives();
      if (is_open()) move_sends();
    }
    run_completions();
  }

  Result<> read_socket() {
    if (!rings_) MUSTER_TRY(accept_region());
    std::array<uint8_t, 4096> bytes;
    MUSTER_ASSIGN(const size_t got, stream_->read(bytes));
    frames_.feed(ByteView(bytes).first(got));
    handle_frames();
    return {};
  }

  Result<> accept_region() {
    MUSTER_ASSIGN(const Fd fd, receive_fd(stream_->fd(), Deadline::after(kDescriptorTimeout)));
    MUSTER_ASSIGN(RingRegion region, RingRegion::open(fd));
    rings_.emplace(std::move(region), 1);
    return {};
  }

  void handle_frames() {
    while (is_open()) {
      Result<std::optional<Frame>> frame = frames_.next();
      if (!frame) return end(link_error(frame.error(), peer()));
      if (!*frame) return;
      if (take_signal(**frame)) continue;
      loop_.unwatch(stream_->fd());
      return begin_drain(parse_close((*frame)->header, (*frame)->payload, peer()));
    }
  }

  bool take_signal(const Frame& frame) {
    if (is_control(frame.header)) return deliver_control(frame.payload), true;
    if (frame.header.length > 0) return false;
    const auto kind = static_cast<LinkFrame>(frame.header.kind);
    if (kind == LinkFrame::kPing) signal(LinkFrame::kPong);
    const bool alive = kind == LinkFrame::kPing || kind == LinkFrame::kPong;
    if (alive) on_pong();
    return alive || kind == LinkFrame::kDoorbell;
  }

  /// A Unix socket takes so few bytes completely or not at all. If it does not take them, it is full of unread frames,
  /// and these wake the peer.
  void signal(LinkFrame kind, ByteView payload = {}) {
    std::array<uint8_t, kFrameHeaderBytes + kMaxControlMessage> frame;
    const auto header = encode(FrameHeader{static_cast<uint32_t>(payload.size()), static_cast<uint8_t>(kind), 0});
    std::copy(payload.begin(), payload.end(), std::copy(header.begin(), header.end(), frame.begin()));
    (void)stream_->write(ByteView(frame).first(header.size() + payload.size()));
  }

  void send_ping() override { signal(LinkFrame::kPing); }
  void write_control(ByteView message) override { signal(LinkFrame::kControl, message); }

  // ---- the end

  void shutdown(const Error* why) override {
    stop_polling();
    loop_.unwatch(stream_->fd());
    linger(loop_, std::move(stream_), encode_close(why));
    rings_.reset();
  }

  void release() override {
    stop_polling();
    loop_.unwatch(stream_->fd());
    stream_.reset();
    rings_.reset();
  }

  Loop& loop_;
  std::unique_ptr<Stream> stream_;
  FrameParser frames_;
  std::optional<Rings> rings_;  // at the acceptor they arrive shortly after the link
  Loop::PollerId poller_ = 0;   // 0: none
  LinkSpin spin_;
  bool moved_ = false;  // bytes have moved since the last poll began
  CpuMigrator core_;
};

/// No TLS: the kernel identifies the peer of a Unix socket, and the bytes in shared memory are not encrypted anyway.
LinkIdentity without_tls(LinkIdentity self) {
  self.credentials.tls = nullptr;
  return self;
}

Result<> check_unix(const Address& address) {
  if (address.is_unix()) return {};
  return fail(ErrorCode::kInvalidArgument,
              "links through shared memory need a Unix socket, not " + address.to_string());
}

Result<std::unique_ptr<Link>> make_shm_link(Loop& loop, NegotiatedLink negotiated, bool connector) {
  auto link = std::make_unique<ShmLink>(loop, std::move(negotiated));
  if (connector) MUSTER_TRY(link->offer_region());
  MUSTER_TRY(link->start());
  return link;
}

}  // namespace

Result<std::unique_ptr<Listener>> listen_shm_links(Loop& loop, const Address& unix_address, LinkIdentity self,
                                                   LinkHandler handler) {
  MUSTER_TRY(check_unix(unix_address));
  const auto factory = [&loop](NegotiatedLink agreed) { return make_shm_link(loop, std::move(agreed), false); };
  return listen_for_links(loop, unix_address, without_tls(std::move(self)), LinkHello::Wire::kShm, factory,
                          std::move(handler));
}

std::unique_ptr<Dial> connect_shm_link(Loop& loop, const Address& unix_address, LinkIdentity self, Rank expected,
                                       const Deadline& deadline, ConnectHandler handler) {
  const auto factory = [&loop](NegotiatedLink agreed) -> Result<std::unique_ptr<Link>> {
    MUSTER_TRY(check_unix(agreed.connection.peer));
    return make_shm_link(loop, std::move(agreed), true);
  };
  return dial_link(loop, unix_address, without_tls(std::move(self)), LinkHello::Wire::kShm, expected, deadline, factory,
                   std::move(handler));
}

}  // namespace muster
