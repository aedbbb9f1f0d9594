#pragma once

#include <optional>
#include <vector>

#include "muster/base/clock.h"
#include "muster/store/state/state.h"

namespace muster {

/// One operation as its client saw it. All times of a history are of one clock.
struct Call {
  int client = 0;
  Request request;
  TimePoint invoked;
  TimePoint returned;
  /// What came back. Nothing: the client never learned whether it took place, and if it did, then at any time after it
  /// was invoked. A wait that was given up without having taken anything does not belong into a history.
  std::optional<Reply> reply{};
};
using History = std::vector<Call>;

/// Whether some order of the calls, each between its invocation and its return, gives every client what it saw, from
/// an empty store on: linearisability (Herlihy and Wing 1990). Searched as Wing and Gong 1993 do, with what was visited
/// remembered (Lowe 2017), for each set of keys that calls join on its own: a history is linearisable if and only if
/// its part on every object is. Barriers are looked at apart: the callers of a round must all wait at one moment, as
/// many as they agreed on.
/// kMismatch: it is not, and the message says at which call the search got stuck. kResourceExhausted: after `max_steps`
/// the search had found no answer.
Result<> check_history(const History& history, size_t max_steps = 20'000'000);

}  // namespace muster
