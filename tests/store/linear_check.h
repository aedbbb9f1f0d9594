#pragma once

#include <optional>
#include <vector>

#include "muster/base/clock.h"
#include "muster/store/state/state.h"

namespace muster {

/// One operation as its client saw it. All times of a history come from one clock.
struct Call {
  int client = 0;
  Request request;
  TimePoint invoked;
  TimePoint returned;
  /// The reply. If not set, the client does not know whether the call took effect. It may have taken effect at any time
  /// after its invocation. A wait that was given up and had no effect must not be in a history.
  std::optional<Reply> reply{};
};
using History = std::vector<Call>;

/// Checks that a history is linearizable (Herlihy and Wing 1990): starting with an empty store, some order of the calls
/// gives every client what it saw, and places each call between its invocation and its return. Searches for this order
/// as in Wing and Gong 1993, and remembers visited states (Lowe 2017). Searches each set of keys that calls join
/// separately, because a history is linearizable if and only if its part on every object is. Barriers are checked
/// separately: all callers of a round, as many as the count says, must wait at one moment. kMismatch if the history is
/// not linearizable; the message shows the call at which the search got stuck. kResourceExhausted if the search found
/// no answer within `max_steps`.
Result<> check_history(const History& history, size_t max_steps = 20'000'000);

}  // namespace muster
