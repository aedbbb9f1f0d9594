#pragma once

#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "muster/base/clock.h"
#include "muster/group/p2p/incoming.h"
#include "muster/group/p2p/outgoing.h"
#include "muster/io/loop_driver.h"
#include "muster/transport/links/link_table.h"

namespace muster {

/// How long pending operations may take to end when a rank leaves the group.
inline constexpr Duration kDrainTime = std::chrono::seconds(10);

/// Point-to-point messages of one rank of a group. The engine has its own links, loop and lock, so messages do not need
/// the execution lock of the collectives and have no order with them. It dials a link to another rank at the first send
/// to that rank.
///
/// Thread-safe. A call does as much as possible in its own thread. The driver (io/loop_driver.h) does the rest.
///
/// If a receive times out or has the wrong length, only that receive fails; with the wrong length also the send of a
/// long message. Any other failure (a lost peer, a message that is stuck half-way) ends all operations and is reported
/// to the peers.
///
/// It has many fields and private functions, one for each kind of event: an event of one peer may end operations of any
/// other peer, so they share all state.
class P2pEngine final : public WorkDriver,
                        public std::enable_shared_from_this<P2pEngine>,
                        private LoopDriver::Delegate {
 public:
  /// Called once, without a lock held, after `why` has ended all operations.
  using FailureHandler = std::function<void(const Error& why)>;

  /// `tcp_streams`: the number of connections in a TCP link.
  static Result<std::shared_ptr<P2pEngine>> create(LinkIdentity self, int tcp_streams);
  ~P2pEngine() override;

  /// Must be called before begin(). Peers may dial from then on. They are accepted once a thread drives the loop.
  Result<std::string> listen(const Address& address, Transport transport);
  /// Sets the endpoints of all ranks, by rank. Must be called before any message.
  void begin(const std::vector<LinkTable::Endpoint>& endpoints);
  void on_failure(FailureHandler handler);

  /// options.timeout must be greater than zero: the engine knows no default.
  Work send(BufferView data, Rank to, uint32_t tag, const CallOptions& options);
  Work receive(BufferView data, Rank from, uint32_t tag, const CallOptions& options);
  /// Ends every pending and later operation with `why`, and tells the peers. Runs no callbacks: the caller must call
  /// run_callbacks() once it holds nothing that a callback may wait for.
  void abort(const Error& why);
  void run_callbacks();
  /// Waits up to kDrainTime for pending sends, then tells the peers that this rank has left. Must be called before the
  /// last owner drops the engine.
  void close();

  void drive(Work::State& state, const Deadline& deadline) override;

  // The channels call the functions below, with the lock held.
  void finish(const MessagePtr& operation, Result<> result);
  /// Changes the number of messages that count as sent but are not written to a link yet.
  void on_copied(int change) { copies_ += change; }

 private:
  using Lock = LoopDriver::Lock;
  /// A rank that has left.
  struct Departure {
    Error why;
    bool drained = false;  ///< no more messages can come from this rank
  };

  P2pEngine(LinkIdentity self, int tcp_streams, std::unique_ptr<Loop> loop);

  // LoopDriver::Delegate
  bool has_work() const override { return !failure_ && (!pending_.empty() || copies_ > 0); }
  void expire() override;
  TimePoint next_deadline() const override { return next_deadline_; }

  Result<MessagePtr> begin_operation(bool receives, BufferView data, Rank peer, uint32_t tag,
                                     const CallOptions& options);
  Work finish_call(Lock& lock, const MessagePtr& operation, const CallOptions& options);
  std::optional<Error> send_failure(Rank to) const;
  std::optional<Error> receive_failure(Rank from) const;

  OutgoingMessages& channel_to(Rank rank);
  void on_linked(Rank rank, LinkTable::Side side, Link& link);
  void on_lost(Rank rank, const Error& why);
  bool on_dial_failed(Rank rank, Error why);
  void probe_later(Rank rank);
  void probe();

  void on_departure(Rank rank, const Error& why);
  void end_receives(Rank rank);
  void end_all(const Error& why, Error to_peers);
  void fail_all(const Error& why);
  void time_out(const MessagePtr& operation);

  const LinkIdentity self_;
  LoopDriver driver_;               ///< its lock guards all fields below
  std::optional<LinkTable> links_;  ///< empty after close()
  MessageMatcher matcher_;
  std::unordered_map<Rank, std::unique_ptr<OutgoingMessages>> outgoing_;
  std::unordered_map<Rank, std::unique_ptr<IncomingMessages>> incoming_;
  bool probing_ = false;

  std::vector<MessagePtr> pending_;  ///< operations that have not ended
  TimePoint next_deadline_{INT64_MAX};
  int copies_ = 0;  ///< messages that count as sent but are not written to a link yet
  std::map<Rank, Departure> departed_;
  std::optional<Error> failure_;  ///< set once all operations have ended
  FailureHandler on_failure_;
};

}  // namespace muster
