#pragma once

#include <cstdint>

#include "muster/base/clock.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace muster {

/// The unit of a time: nanoseconds of CLOCK_MONOTONIC, or ticks of the processor's counter. Reading the counter costs a
/// third of the time, and all processes of a host see the same counter.
enum class TickKind : uint32_t { kNanoseconds = 0, kCounter = 1 };

/// The counter if it runs at one rate on all cores and in all power states, else nanoseconds.
TickKind best_ticks();

inline int64_t ticks(TickKind kind) {
  if (kind == TickKind::kCounter) {
#if defined(__x86_64__)
    return static_cast<int64_t>(__rdtsc());
#elif defined(__aarch64__)
    int64_t count;
    asm volatile("mrs %0, cntvct_el0" : "=r"(count));
    return count;
#endif
  }
  return steady_clock().now().ns;
}

/// One moment on both clocks, to convert between them.
struct Moment {
  int64_t ticks = 0;
  int64_t ns = 0;
};
Moment moment_now(TickKind kind);

/// Converts ticks to CLOCK_MONOTONIC, from two moments.
class TickScale {
 public:
  TickScale(TickKind kind, const Moment& first, const Moment& second);
  TimePoint time_of(int64_t ticks) const;
  double ns_per_tick() const { return ns_per_tick_; }

 private:
  Moment first_;
  double ns_per_tick_;
};

}  // namespace muster
