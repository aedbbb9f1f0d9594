#pragma once

#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "muster/rpc/call.h"
#include "muster/rpc/log/call_log.h"

namespace muster::rpc {

/// A call of this worker, in the tables of its endpoint. The endpoint's lock guards the fields.
struct OutgoingCall : CallState {
  using CallState::CallState;

  std::string to, function;
  Message arguments;  ///< kept until the call has ended if it is idempotent, else until it is sent
  CallOptions options;
  std::multimap<TimePoint, std::shared_ptr<OutgoingCall>>::iterator deadline;  ///< in the list of pending calls
  Rank peer = kNoRank;                                                         ///< id of the worker, once it is known
  uint64_t id = 0;     ///< of the request, once it was sent; numbers the requests to one worker from 1
  bool waits = false;  ///< for its worker to be found, for a connection, or for room in the window
  std::list<std::shared_ptr<OutgoingCall>>::iterator place;  ///< in the list of waiting calls, while it waits
  bool retried = false;
  LoggedCall logged;
  std::function<void()> cancel_here;  ///< of a call to this worker itself

  /// "call of "f" at worker "ps"".
  std::string to_string() const;
};
using CallPtr = std::shared_ptr<OutgoingCall>;

/// The calls of this worker to one other worker: those that wait, and those in its window. A state machine without
/// sockets. Not thread-safe.
class PeerCalls {
 public:
  struct Limits {
    size_t queued;     ///< calls that wait
    size_t in_flight;  ///< calls that were sent and have no reply
    uint64_t bytes;    ///< footprint of the arguments of the calls in flight; one call may have more
  };

  explicit PeerCalls(const Limits& limits) : limits_(limits) {}

  /// Adds a call. False if too many calls wait already.
  bool add(CallPtr call);
  /// The next call to be sent, which is in the window from now on and has an id. Null if none waits, or if the window
  /// has no room.
  CallPtr next();
  /// The window has room again, because the request with this id was answered. Returns its call, null if that has ended
  /// before. kProtocol for an id that was not sent, or was answered before, and if only the start of a call was
  /// reported that is not one-way.
  Result<CallPtr> on_answer(uint64_t id, bool started = false);
  /// The caller does not wait any more. A request in the window keeps its room until it is answered, because the worker
  /// may still be busy with it.
  void abandon(OutgoingCall& call);
  /// The connection is gone. Empties the window, and returns its calls.
  std::vector<CallPtr> on_lost();
  /// Removes the calls that wait, and returns them.
  std::vector<CallPtr> take_waiting();

  bool is_in_flight(uint64_t id) const { return in_flight_.contains(id); }
  bool has_waiting() const { return !waiting_.empty(); }
  size_t in_flight() const { return in_flight_.size(); }

 private:
  struct InFlight {
    CallPtr call;  ///< null: abandoned
    uint64_t bytes = 0;
    bool one_way = false;
  };

  const Limits limits_;
  std::list<CallPtr> waiting_;
  std::unordered_map<uint64_t, InFlight> in_flight_;
  uint64_t bytes_ = 0;  ///< footprint of the arguments in flight
  uint64_t last_id_ = 0;
};

}  // namespace muster::rpc
