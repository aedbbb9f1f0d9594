#pragma once

#include <optional>

#include "muster/transport/completion_queue.h"
#include "muster/transport/transfer.h"

namespace muster {

/// What all links have in common: the pending operations, how a link ends, and when completions run. A transport only
/// moves bytes, in pump_sends() and pump_receives(), which never call back: every entry point ends with settle().
class LinkBase : public Link {
 public:
  void send(std::span<const ConstSegment> from, Completion completion) final;
  void receive(std::span<const Segment> into, Completion completion) final;
  void close(Error why) final;
  void on_close(std::function<void(const Error&)> handler) final;
  void ping(std::function<void()> pong) final;
  void send_control(ByteView bytes) final;
  void set_control_handler(std::function<void(ByteView)> handler) final { control_handler_ = std::move(handler); }
  bool is_open() const final { return !ended_.has_value(); }
  const Peer& peer() const final { return peer_; }

 protected:
  /// Moved at once; then others have their turn.
  static constexpr size_t kTurnBytes = size_t{8} << 20;

  explicit LinkBase(Peer peer) : peer_(std::move(peer)) {}

  /// Moves what can be moved now: calls complete_sends() and complete_receives(), and end() or part() when the link
  /// fails.
  virtual void pump_sends() = 0;
  virtual void pump_receives() = 0;
  /// Whether bytes that the peer sent before it parted wait for a receive.
  virtual bool has_unread() const = 0;
  /// Tells the peer, as far as possible without waiting (null: goodbye, no reason), and lets go of everything.
  virtual void shutdown(const Error* why) = 0;
  /// Called once when the link ended otherwise: lets go of everything.
  virtual void release() = 0;
  /// Asks the peer for a sign of life.
  virtual void send_ping() = 0;
  /// The peer has given one.
  void on_pong();
  /// Brings the peer a note, if there is room for it.
  virtual void write_control(ByteView message) = 0;
  /// The peer has brought one.
  void deliver_control(ByteView message);

  bool sending() const { return !sends_.empty(); }
  bool receiving() const { return !receives_.empty(); }
  Transfer& next_send() { return sends_.front(); }
  Transfer& next_receive() { return receives_.front(); }
  /// Looks whether the first operation is done; to be called after it was advanced.
  void complete_sends() { complete_done(sends_); }
  void complete_receives() { complete_done(receives_); }

  /// The link is over: all pending and later operations get `why`.
  void end(Error why);
  /// The peer is gone, but what it sent before can still be received: the link ends when that is done, or when
  /// something is to be sent.
  void begin_drain(Error why);
  /// Calls back. The last statement of every entry point: the link may be gone afterwards.
  void run_completions();
  /// Nothing is ever called back again (a simulated crash).
  void mute() { completions_.mute(); }
  /// The destructor's part of every transport's destructor: says goodbye and fails what is pending.
  void destroy_pending();

 private:
  void complete_done(Fifo<Transfer>& operations);
  void fail_all(Fifo<Transfer>& operations);
  void fail_pending();

  Peer peer_;
  Fifo<Transfer> sends_, receives_;
  std::optional<Error> ended_, draining_;
  std::function<void(const Error&)> close_handler_;
  std::function<void(ByteView)> control_handler_;
  Fifo<std::function<void()>> pongs_;
  CompletionQueue completions_;
};

/// "rank 3 (host b, pid 812) closed its link", as kAborted: what a link that is destroyed leaves behind.
Error shutdown_error(const Peer& peer);

}  // namespace muster
