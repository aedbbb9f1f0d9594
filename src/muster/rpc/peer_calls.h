#pragma once

#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "muster/rpc/call.h"
#include "muster/rpc/endpoint.h"
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

  /// "call of "f" at worker "ps" (request 7)", with the number that the logs of both workers show, once it was sent.
  std::string to_string() const;
};
using CallPtr = std::shared_ptr<OutgoingCall>;

/// The room for calls of one worker to another one that have no reply. Both workers keep it by the same rules: the
/// caller sends no call for which there is no room, and the called worker closes the link of a caller that does.
///
/// A call needs room until its function has started. So a function may wait for calls to its caller, which may wait for
/// calls itself: as long as functions can start, there is room for further calls. While the window is crowded, the
/// called worker reports each start. The starts that it has not reported fill less than half of the window.
class CallWindow {
 public:
  struct Limits {
    size_t calls;
    uint64_t bytes;  ///< footprint of the arguments. One call may have more if less than half of this is used.
  };
  /// So many times the limits are the limits for all calls without a reply, whether they have started or not.
  static constexpr unsigned kMaxStarted = 16;

  explicit CallWindow(const Limits& limits) : limits_(limits) {}

  bool has_room(uint64_t bytes) const {
    const bool fits = waiting_.bytes < limits_.bytes / 2 || waiting_.bytes + bytes <= limits_.bytes;
    const bool all_fit = all_.bytes == 0 || all_.bytes + bytes <= kMaxStarted * limits_.bytes;
    return fits && all_fit && waiting_.calls < limits_.calls && all_.calls < kMaxStarted * limits_.calls;
  }
  bool is_crowded() const { return waiting_.calls >= limits_.calls / 2 || waiting_.bytes >= limits_.bytes / 2; }
  void add(uint64_t bytes) {
    waiting_.add(bytes);
    all_.add(bytes);
  }
  /// The start of a function was reported.
  void start(uint64_t bytes) { waiting_.remove(bytes); }
  void end(uint64_t bytes, bool start_was_reported) {
    if (!start_was_reported) start(bytes);
    all_.remove(bytes);
  }
  const Limits& limits() const { return limits_; }

 private:
  struct Use {
    size_t calls = 0;
    uint64_t bytes = 0;
    void add(uint64_t more) {
      ++calls;
      bytes += more;
    }
    void remove(uint64_t less) {
      --calls;
      bytes -= less;
    }
  };
  Limits limits_;
  Use waiting_;  ///< calls whose start was not reported
  Use all_;      ///< calls without a reply
};

inline constexpr CallWindow::Limits kCallWindow{kMaxCallsInFlight, kMaxBytesInFlight};

/// The calls of this worker to one other worker: those that wait, and those in its window. A state machine without
/// sockets. Not thread-safe.
class PeerCalls {
 public:
  /// `max_queued`: calls that wait.
  PeerCalls(size_t max_queued, const CallWindow::Limits& limits) : max_queued_(max_queued), window_(limits) {}

  /// Adds a call. False if too many calls wait already.
  bool add(CallPtr call);
  /// The next call to be sent, which is in the window from now on and has an id. Null if none waits, or if the window
  /// has no room.
  CallPtr next();
  /// The window has room again, because the request with this id was answered, or its function has started. Returns the
  /// call if it ends with this, null if it has ended before. kProtocol for an id that was not sent, or was answered
  /// before, and for a start that was reported before.
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
    bool one_way = false, started = false;
  };

  const size_t max_queued_;
  std::list<CallPtr> waiting_;
  std::unordered_map<uint64_t, InFlight> in_flight_;
  CallWindow window_;
  uint64_t last_id_ = 0;
};

}  // namespace muster::rpc
