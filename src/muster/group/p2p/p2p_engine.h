#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>

#include "muster/base/clock.h"
#include "muster/base/yield_budget.h"
#include "muster/collective/rank_info.h"
#include "muster/group/engine/process_monitor.h"
#include "muster/group/p2p/incoming.h"
#include "muster/group/p2p/outgoing.h"
#include "muster/transport/socket/socket_link.h"
#include "muster/transport/striped_link.h"
#include "muster/transport/transport.h"

namespace muster {

/// How long what was submitted or sent may take to be done when its group is destroyed.
inline constexpr Duration kDrainTime = std::chrono::seconds(10);

/// Point-to-point messages of one rank of a group. Has links, a loop and a lock of its own, so it needs neither the
/// collectives' turn nor their order. To each rank that it sends to it dials a link, at the first message.
///
/// Thread-safe. Whatever a call can do at once it does in the caller's thread. Who waits drives the loop; of several,
/// one does so for all. A thread of the P2P engine's own takes over what nobody has waited for during kGrace.
///
/// A receive that gets nothing by its deadline ends alone, as does one that does not fit its message. Any other failure
/// (a peer lost, a message stuck half-way) ends everything here, and is told to the peers.
class P2pEngine final : public WorkDriver, public std::enable_shared_from_this<P2pEngine>, private P2pDelegate {
 public:
  /// Where a rank's P2P engine listens.
  struct Place {
    RankInfo member;
    std::string address;
    Transport transport = Transport::kTcp;
  };
  /// Called once, without any lock, when everything has ended for `why`.
  using FailureHandler = std::function<void(const Error& why)>;

  static constexpr Duration kGrace = 1ms;

  /// `tcp_streams`: connections that a link over TCP is made of.
  static Result<std::shared_ptr<P2pEngine>> create(LinkIdentity self, int tcp_streams);
  ~P2pEngine() override;

  /// Before begin(). Peers may dial from then on; they are let in once somebody drives the loop.
  Result<std::string> listen(const Address& address, Transport transport);
  /// Before any message. `places` by rank.
  void begin(std::vector<Place> places);
  void on_failure(FailureHandler handler);

  /// Within options.timeout, which must be given.
  Work send(BufferView data, Rank to, uint32_t tag, const CallOptions& options);
  Work receive(BufferView data, Rank from, uint32_t tag, const CallOptions& options);
  /// Ends every pending and later operation with `why`, and tells the peers. Calls nobody back: to be followed by
  /// call_back(), once the caller holds nothing that a callback may wait for.
  void abort(const Error& why);
  void call_back();
  /// Sends what was sent (within limits) and leaves. To be called before the last owner lets go.
  void close();

  void drive(Work::State& state, const Deadline& deadline) override;

 private:
  struct Outgoing {
    std::unique_ptr<OutgoingMessages> channel;
    LaneSet lanes;                             ///< until the link is whole
    std::vector<std::unique_ptr<Dial>> dials;  ///< by lane
  };
  using Lock = std::unique_lock<std::mutex>;

  P2pEngine(LinkIdentity self, int tcp_streams) : self_(std::move(self)), tcp_streams_(tcp_streams) {}

  // P2pDelegate
  void finish(const MessagePtr& operation, Result<> result) override;
  void ended(MessageChannel& channel, const Error& why) override;
  void copied(int change) override { copies_ += change; }

  Result<MessagePtr> begin_operation(bool receives, BufferView data, Rank peer, uint32_t tag,
                                     const CallOptions& options);
  Work finish_call(Lock& lock, const MessagePtr& operation, const CallOptions& options);
  std::optional<Error> send_failure(Rank to) const;
  std::optional<Error> receive_failure(Rank from) const;

  // links
  OutgoingMessages& channel_to(Rank rank);
  int lanes(Transport transport) const { return transport == Transport::kTcp ? tcp_streams_ : 1; }
  void dial(Rank rank, int lane);
  void dialled(Rank rank, int lane, Result<std::unique_ptr<Link>> link);
  void adopt(std::unique_ptr<Link> link);
  void watch_process(Rank rank);
  void probe_later(Rank rank);
  void probe();

  // failures
  void lost(Rank rank, const Error& why);
  void left(Rank rank, const Error& why);
  void end_receives(Rank rank);
  void end_all(const Error& why, const Error& to_peers);
  void die(const Error& why);
  void expire();
  void time_out(const MessagePtr& operation);

  // progress
  bool has_work() const { return !dead_ && (!pending_.empty() || copies_ > 0); }
  void wait_until(Lock& lock, const std::function<bool()>& done, const Deadline& deadline);
  void take_turns(Lock& lock, const std::function<bool()>& done, const Deadline& deadline);
  void park(Lock& lock, Duration longest);
  void call_back(Lock& lock);
  void wake_thread();
  void progress();

  const LinkIdentity self_;
  const int tcp_streams_;
  std::mutex mutex_;  ///< over all that follows
  std::unique_ptr<Loop> loop_;
  std::vector<Place> places_;
  FailureHandler on_failure_;
  MessageMatcher matcher_;
  std::unordered_map<Rank, Outgoing> outgoing_;
  std::unordered_map<Rank, std::unique_ptr<IncomingMessages>> incoming_;
  std::unordered_map<Rank, LaneSet> arriving_;  ///< of incoming links that are not whole yet
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::map<Rank, Fd> processes_;  ///< of peers on this host, as pidfds
  bool probing_ = false;

  std::vector<MessagePtr> pending_;  ///< not finished
  TimePoint earliest_{INT64_MAX};    ///< no pending operation's deadline is sooner
  int copies_ = 0;                   ///< messages that count as sent and wait for a link
  std::map<Rank, Error> gone_;       ///< ranks that have left: nothing is sent to them
  std::set<Rank> drained_;           ///< of them, those from which nothing more can come
  std::optional<Error> dead_;
  std::vector<std::function<void()>> callbacks_;  ///< to be called without the lock

  std::condition_variable changed_;  ///< for those that wait while another drives, and for close()
  bool driving_ = false;             ///< somebody takes turns of the loop
  YieldBudget yields_;               ///< of whoever does
  bool by_thread_ = false;           ///< it is the P2P engine's own thread
  bool parked_ = false;              ///< it sleeps
  int waiting_ = 0;                  ///< for changed_
  int calling_ = 0;                  ///< threads within callbacks

  std::condition_variable work_;  ///< for the thread
  std::thread thread_;
  bool asleep_ = false;  ///< the thread, until it is roused
  bool stopping_ = false;
};

}  // namespace muster
