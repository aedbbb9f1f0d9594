#pragma once

#include "muster/base/clock.h"

namespace muster {

/// A clock that a test moves.
struct ManualClock : Clock {
  TimePoint now() const override { return time; }
  void pass(Duration duration) { time = time + duration; }
  TimePoint time{1'000'000'000'000};
};

}  // namespace muster
