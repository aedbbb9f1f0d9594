#pragma once

#include <chrono>
#include <cstdint>

namespace muster {

using Duration = std::chrono::nanoseconds;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using std::chrono_literals::operator""us;

/// Nanoseconds on one Clock; never compared across clocks or hosts.
struct TimePoint {
  int64_t ns = 0;
  friend auto operator<=>(TimePoint, TimePoint) = default;
  friend TimePoint operator+(TimePoint t, Duration d);
  friend Duration operator-(TimePoint a, TimePoint b) { return Duration(a.ns - b.ns); }
};

/// A source of time: the machine's monotonic clock, or the simulator's. Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint now() const = 0;
};

/// CLOCK_MONOTONIC. Stateless; lives as long as the program.
const Clock& steady_clock();

/// An absolute time by which a wait must have ended. Copyable; borrows its clock.
class Deadline {
 public:
  /// `timeout` from now. The sum saturates, so a huge timeout never becomes a time in the past.
  static Deadline after(Duration timeout, const Clock& clock = steady_clock());
  /// `timeout` from the first call of when(), left() or passed(). So a call that does not wait does not read the clock.
  /// Not thread-safe. A copy that is made before this first call starts its own timeout.
  static Deadline once_waiting(Duration timeout, const Clock& clock = steady_clock()) {
    Deadline deadline({}, clock);
    deadline.not_yet_ = timeout;
    return deadline;
  }
  /// Never passes. For a wait that another event ends.
  static Deadline never() { return after(Duration::max()); }
  static Deadline at(TimePoint when, const Clock& clock = steady_clock()) { return Deadline(when, clock); }

  bool passed() const { return clock_->now() >= when(); }
  /// Time left, never negative.
  Duration left() const;
  /// Time left as a poll/epoll timeout: milliseconds rounded up, capped to an int.
  int poll_timeout_ms() const;
  TimePoint when() const {
    if (not_yet_ > Duration::zero()) start();
    return when_;
  }
  const Clock& clock() const { return *clock_; }
  /// The earlier of the two.
  Deadline or_sooner(TimePoint other) const { return Deadline(other < when() ? other : when_, *clock_); }

 private:
  Deadline(TimePoint when, const Clock& clock) : when_(when), clock_(&clock) {}
  void start() const;

  mutable TimePoint when_;
  mutable Duration not_yet_{};  ///< the timeout, until when() is first called; then zero
  const Clock* clock_;
};

}  // namespace muster
