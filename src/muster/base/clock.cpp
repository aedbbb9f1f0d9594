#include "muster/base/clock.h"

#include <time.h>

#include <algorithm>
#include <limits>

namespace muster {
namespace {

class SteadyClock final : public Clock {
 public:
  TimePoint now() const override {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return TimePoint{t.tv_sec * 1'000'000'000LL + t.tv_nsec};
  }
};

const SteadyClock kSteadyClock;

// The standard library adds left() to the time of its own clock. This sum must not overflow.
constexpr Duration kMaxLeft = std::chrono::hours(24 * 365);

}  // namespace

TimePoint operator+(TimePoint t, Duration d) {
  int64_t sum;
  if (__builtin_add_overflow(t.ns, static_cast<int64_t>(d.count()), &sum)) {
    sum = d.count() > 0 ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min();
  }
  return TimePoint{sum};
}

const Clock& steady_clock() { return kSteadyClock; }

Deadline Deadline::after(Duration timeout, const Clock& clock) { return Deadline(clock.now() + timeout, clock); }

void Deadline::start() const {
  when_ = clock_->now() + not_yet_;
  not_yet_ = Duration::zero();
}

Duration Deadline::left() const { return std::clamp(when() - clock_->now(), Duration::zero(), kMaxLeft); }

int Deadline::poll_timeout_ms() const {
  const int64_t ms = std::chrono::ceil<std::chrono::milliseconds>(left()).count();
  return static_cast<int>(std::min<int64_t>(ms, std::numeric_limits<int>::max()));
}

}  // namespace muster
