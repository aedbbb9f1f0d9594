#pragma once

#include <optional>

#include "muster/transport/completion_queue.h"
#include "muster/transport/transfer.h"

namespace muster {

/// Base class of all links: how a link ends and calls back.
class LinkState : public Link {
 public:
  void on_close(std::function<void(const Error&)> handler) final;
  void set_control_handler(std::function<void(ByteView)> handler) final { control_handler_ = std::move(handler); }
  bool is_open() const final { return !ended_.has_value(); }
  const Peer& peer() const final { return peer_; }

 protected:
  explicit LinkState(Peer peer) : peer_(std::move(peer)) {}

  /// Queues the callbacks of all pending operations, with `*ended_`.
  virtual void fail_operations() = 0;
  /// Stores the reason, and queues the callbacks of all pending operations and of on_close().
  void set_ended(Error why);
  /// Queues the callback for a control message.
  void deliver_control(ByteView message);
  /// For destructors, after the transport has released all buffers: fails the pending operations and calls back now.
  void destroy_pending();

  const Peer peer_;
  std::optional<Error> ended_;
  CompletionQueue completions_;

 private:
  std::function<void(const Error&)> close_handler_;
  std::function<void(ByteView)> control_handler_;
};

/// Holds the pending operations of a link over one transport, and completes them. A transport only moves bytes, in
/// pump_sends() and pump_receives(). These never call back: every entry point ends with run_completions().
class LinkBase : public LinkState {
 public:
  void send(std::span<const ConstSegment> from, Completion completion) final;
  void receive(std::span<const Segment> into, Completion completion) final;
  void close(Error why) final;
  void ping(std::function<void()> pong) final;
  void send_control(ByteView bytes) final;

 protected:
  /// The most bytes that one call moves, so that other links get their turn.
  static constexpr size_t kTurnBytes = size_t{8} << 20;

  using LinkState::LinkState;

  /// Move as many bytes as possible now. Call complete_done(), and end() or begin_drain() if the link fails.
  virtual void pump_sends() = 0;
  virtual void pump_receives() = 0;
  /// True if bytes that the peer sent before it closed wait for a receive.
  virtual bool has_unread() const = 0;
  /// Sends the reason (null: none) to the peer without waiting for the peer, and releases all resources.
  virtual void shutdown(const Error* why) = 0;
  /// Releases all resources. Called once, when the link ended without shutdown().
  virtual void release() = 0;
  virtual void send_ping() = 0;
  /// The peer has answered a ping, or has sent one.
  void on_pong();
  /// Sends a control message if there is room for it.
  virtual void write_control(ByteView message) = 0;

  bool sending() const { return !sends_.empty(); }
  bool receiving() const { return !receives_.empty(); }
  /// To be called after the first operation was advanced: completes it if all its bytes have moved.
  void complete_done(Fifo<Transfer>& operations);

  /// Ends the link: all pending and later operations get `why`.
  void end(Error why);
  /// The peer is gone, but the bytes that it sent before can still be received. The link ends when they are received,
  /// or with the next send.
  void begin_drain(Error why);
  /// Calls back. The last statement of every entry point, because a callback may destroy the link.
  void run_completions();
  /// Drops all callbacks, also later ones (a simulated crash).
  void mute() { completions_.mute(); }
  /// The destructor of every transport calls this. Shuts the link down and fails the pending operations.
  void destroy_link();

  Fifo<Transfer> sends_, receives_;  ///< the pending operations; the first of each is being moved

 private:
  bool start(Fifo<Transfer>& operations, Transfer&& transfer);
  void fail_operations() final;

  std::optional<Error> draining_;
  Fifo<std::function<void()>> pongs_;
};

/// "rank 3 (host b, pid 812) closed its link", as kAborted: the peer shut the link down without a reason.
Error shutdown_error(const Peer& peer);

}  // namespace muster
