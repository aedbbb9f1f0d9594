#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "muster/io/loop_driver.h"
#include "muster/rpc/channel.h"
#include "muster/rpc/directory.h"
#include "muster/rpc/endpoint.h"
#include "muster/rpc/name_look_up.h"
#include "muster/rpc/peer_calls.h"
#include "muster/transport/links/link_table.h"

namespace muster::rpc {

/// The calls of this worker to other workers: finds and connects them, sends requests, ends calls with their answers,
/// at their deadlines, or with the loss of the worker. Not thread-safe: guarded by the driver's lock.
class Client {
 public:
  Client(LoopDriver& driver, LinkTable& links, Directory& directory, const EndpointOptions& options,
         const WorkerRecord& self, CallLog& log);

  /// The call is pending from now on, and its timeout begins. `now`, also below: the current time. The callers read the
  /// clock, so that one read serves several functions.
  void begin(const CallPtr& call, TimePoint now);
  /// Sends the call to its worker, once that is known and connected.
  void dispatch(const CallPtr& call, TimePoint now);
  void finish(OutgoingCall& call, CallResult result);
  /// Ends the call, and tells the worker that nobody waits for it.
  void abandon(OutgoingCall& call, CallError why);
  /// Ends all calls. Later calls end at once with the same error.
  void end_calls(const Error& why);
  /// Waits until no name is looked up. Must be called after end_calls(), and without the lock.
  void join_look_ups();
  /// Drops all workers. Must be called after end_calls(), and after the links were closed.
  void close();
  bool has_pending() const { return !pending_.empty(); }
  /// "2 calls, such as call of "f" at worker "ps"". Requires a pending call.
  std::string describe_pending() const;

  void expire();
  TimePoint next_deadline() const;

  // Events of the link table.
  void on_linked(Rank rank, Link& link);
  /// Returns true if the worker must be dialed again.
  bool on_dial_failed(Rank rank, Error why);
  /// The connection to the worker has ended. Must not be called from within a function of its link.
  void on_lost(Rank rank, const Error& why);
  /// True if the worker is being dialed.
  bool is_dialing(Rank rank) const;

 private:
  /// A worker that this one calls.
  struct Callee {
    Callee(WorkerRecord found, LinkTable::Endpoint at, size_t max_queued_calls)
        : record(std::move(found)), endpoint(std::move(at)), calls(max_queued_calls, kCallWindow) {}

    const WorkerRecord record;
    const LinkTable::Endpoint endpoint;
    PeerCalls calls;
    std::unique_ptr<Channel> channel;  ///< null while there is no link
    TimePoint last_heard;
  };

  void look_up(const CallPtr& call);
  bool on_looked_up(const std::string& name, const Result<std::optional<WorkerRecord>>& found);
  void fail_calls_to_left(const std::string& name, std::list<CallPtr>& calls);
  Result<LinkTable::Endpoint> endpoint_of(const WorkerRecord& record) const;
  Result<> add_callee(const WorkerRecord& record);
  void forget(Callee& callee);
  void send_waiting(Callee& callee, TimePoint now);
  void send(Callee& callee, OutgoingCall& call, TimePoint now);
  void on_answer(Callee& callee, ParsedMessage answer);
  Result<> handle_answer(Callee& callee, ParsedMessage& answer);
  void retry_later(std::vector<CallPtr> calls);
  void check_heartbeats();
  std::string timeout_message(const OutgoingCall& call) const;
  CallError too_many_wait(const std::string& worker) const;

  LoopDriver& driver_;
  LinkTable& links_;
  const EndpointOptions& options_;
  const WorkerRecord& self_;
  CallLog& log_;
  std::multimap<TimePoint, CallPtr> pending_;  ///< all calls that have not ended, by deadline
  std::unordered_map<Rank, std::shared_ptr<Callee>> callees_;
  std::unordered_map<std::string, Rank> names_;                     ///< the worker that has a name now
  std::unordered_map<std::string, std::string> left_;               ///< workers that said goodbye, by name
  std::unordered_map<std::string, std::list<CallPtr>> unresolved_;  ///< calls to names that are being looked up
  NameLookUp look_up_;
  std::optional<Error> closed_;
};

/// An error of this layer, without a remote traceback.
CallError local_error(ErrorCode code, std::string message, Rank rank = kNoRank);

}  // namespace muster::rpc
