#include "muster/flight/ticks.h"

#include <algorithm>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace muster {

TickKind best_ticks() {
#if defined(__x86_64__)
  constexpr unsigned kPowerManagement = 0x80000007, kInvariantCounter = 1u << 8;  // CPUID's leaf, and its bit of EDX
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool asked = __get_cpuid(kPowerManagement, &eax, &ebx, &ecx, &edx) != 0;
  return asked && (edx & kInvariantCounter) != 0 ? TickKind::kCounter : TickKind::kNanoseconds;
#elif defined(__aarch64__)
  return TickKind::kCounter;
#else
  return TickKind::kNanoseconds;
#endif
}

Moment moment_now(TickKind kind) {
  // Takes the shortest of several tries, because a thread may lose its core during a try.
  Moment best;
  int64_t shortest = INT64_MAX;
  for (int i = 0; i < 5; ++i) {
    const int64_t before = ticks(kind);
    const int64_t ns = steady_clock().now().ns;
    const int64_t after = ticks(kind);
    if (after - before >= shortest) continue;
    shortest = after - before;
    best = {before + (after - before) / 2, ns};
  }
  return best;
}

TickScale::TickScale(TickKind kind, const Moment& first, const Moment& second) : first_(first), ns_per_tick_(1) {
  const auto ticks_between = static_cast<double>(second.ticks) - static_cast<double>(first.ticks);
  if (kind == TickKind::kCounter && ticks_between > 0) {
    ns_per_tick_ = (static_cast<double>(second.ns) - static_cast<double>(first.ns)) / ticks_between;
  }
}

TimePoint TickScale::time_of(int64_t ticks) const {
  // Another process has written the numbers. Whatever they are, the difference of two results does not overflow.
  constexpr double kMost = 4e18;
  const auto since = static_cast<int64_t>(static_cast<uint64_t>(ticks) - static_cast<uint64_t>(first_.ticks));
  const double later = std::clamp(static_cast<double>(since) * ns_per_tick_, -kMost, kMost);
  const double sum = static_cast<double>(first_.ns) + later;
  if (sum < -kMost || sum > kMost) return {sum < 0 ? -static_cast<int64_t>(kMost) : static_cast<int64_t>(kMost)};
  return {first_.ns + static_cast<int64_t>(later)};
}

}  // namespace muster
