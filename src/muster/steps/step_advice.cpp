#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "muster/steps/step_report.h"
#include "muster/steps/step_units.h"

namespace muster {
namespace {

using Bucket = StepReport::Bucket;

// Shorter waits are not reported.
constexpr double kMinShareOfStep = 0.02;
constexpr Duration kMinWait = 100us;
// Smaller buckets cost more in messages than in bytes.
constexpr size_t kSmallBucket = 256 << 10;

/// A common bucket size in MiB: at most half of `bytes`, at least 1.
size_t smaller_cap(size_t bytes) {
  constexpr std::array<size_t, 7> kCaps{100, 50, 25, 10, 5, 2, 1};
  const auto* cap = std::find_if(kCaps.begin(), kCaps.end(), [&](size_t mib) { return (mib << 20) <= bytes / 2; });
  return cap == kCaps.end() ? 1 : *cap;
}

bool can_be_split(const Bucket& bucket) { return bucket.parameters.size() > 1 && bucket.bytes > (size_t{1} << 20); }

/// The time without communication while this bucket filled, from its first gradient on.
Duration idle_before(const std::vector<Bucket>& buckets, size_t i) {
  const TimePoint free = i == 0 ? TimePoint{} : buckets[i - 1].times.ended;
  return buckets[i].started - std::max(free, buckets[i].times.first_ready);
}

/// The rate of the fastest reduction, in bytes per nanosecond. Slower ones waited for another rank or for the machine.
double best_rate(const std::vector<Bucket>& buckets) {
  double best = 0;
  for (const Bucket& bucket : buckets) {
    if (bucket.reduction().count() <= 0) continue;
    best = std::max(best, static_cast<double>(bucket.bytes) / static_cast<double>(bucket.reduction().count()));
  }
  return best;
}

/// The time that reductions took beyond what the best rate allows.
Duration waited_for_others(const std::vector<Bucket>& buckets) {
  const double rate = best_rate(buckets);
  Duration waited{};
  for (const Bucket& bucket : buckets) {
    const auto needed = Duration(rate > 0 ? static_cast<int64_t>(static_cast<double>(bucket.bytes) / rate) : 0);
    if (bucket.bytes >= kSmallBucket) waited += std::max(Duration(0), bucket.reduction() - needed);
  }
  return waited;
}

/// The bucket that kept communication idle longest. A smaller one would have begun earlier.
std::string advise_on_filling(const StepReport& report) {
  size_t worst = 0;
  for (size_t i = 1; i < report.buckets.size(); ++i) {
    if (idle_before(report.buckets, i) > idle_before(report.buckets, worst)) worst = i;
  }
  const Bucket& bucket = report.buckets[worst];
  const Duration idle = idle_before(report.buckets, worst);
  if (idle < kMinWait || idle < report.exposed / 4) return {};
  if (!can_be_split(bucket)) return {};
  return fmt::format("bucket {} waits {} for layer `{}`: lower bucket_cap_mb to {}", worst, milliseconds(idle),
                     bucket.last, smaller_cap(bucket.bytes));
}

/// The last bucket is full when backward ends, so only a smaller one helps. Otherwise several buckets began too late.
std::string advise_on_size(const StepReport& report) {
  const Bucket& last = report.buckets.back();
  const Duration behind = last.times.ended - std::max(last.started, report.times.last_gradient);
  if (behind < report.exposed / 2 || !can_be_split(last)) return advise_on_filling(report);
  return fmt::format(
      "{} of the wait is for the last bucket ({} MiB), which fills when backward ends: lower bucket_cap_mb to {}",
      milliseconds(behind), mebibytes(last.bytes), smaller_cap(last.bytes));
}

/// A bucket that is full before its turn: gradients arrive in another order than when buckets were built.
std::string advise_on_order(const StepReport& report) {
  for (size_t i = 1; i < report.buckets.size(); ++i) {
    const Bucket &before = report.buckets[i - 1], &bucket = report.buckets[i];
    const Duration early = before.times.ready - bucket.times.ready;
    if (early < kMinWait || early < report.exposed / 4) continue;
    return fmt::format(
        "bucket {} was full {} before its turn, which bucket {} held up for layer `{}`: the order of gradients changes "
        "between steps; if layers can be skipped, put them into buckets of their own (bucket_cap_mb_list)",
        i, milliseconds(early), i - 1, before.last);
  }
  return {};
}

std::string advise_on_bytes(const StepReport& report) {
  const Duration backward = report.times.last_gradient - report.times.backward;
  if (report.communication < backward || report.exposed < backward / 4) return {};
  return fmt::format(
      "communication ({}) takes longer than backward ({}), so smaller buckets help little: send fewer bytes with a "
      "hook "
      "(muster.hooks.bf16, int8), or communicate less often (no_sync)",
      milliseconds(report.communication), milliseconds(backward));
}

std::string advise_on_count(const StepReport& report) {
  const auto small = [](const Bucket& bucket) { return bucket.bytes < kSmallBucket; };
  const size_t count = std::count_if(report.buckets.begin(), report.buckets.end(), small);
  if (count < 8 || 2 * count < report.buckets.size()) return {};
  return fmt::format(
      "{} of {} buckets are smaller than 0.25 MiB, and each costs a round of messages: raise bucket_cap_mb", count,
      report.buckets.size());
}

}  // namespace

std::vector<std::string> advise(const StepReport& report) {
  if (report.buckets.empty() || report.times.iteration == 0) return {};
  const TimePoint begin = report.times.forward.ns != 0 ? report.times.forward : report.times.backward;
  const Duration wait = report.times.ended - report.times.last_gradient;
  if (wait < kMinWait || in_milliseconds(wait) < kMinShareOfStep * in_milliseconds(report.times.ended - begin))
    return {};
  if (report.times.iteration == 1) {
    return {
        "this was the first backward, in the order of registration: look at a later one, after buckets were rebuilt"};
  }
  if (const Duration others = waited_for_others(report.buckets); others > wait / 2) {
    return {fmt::format("{} of the reductions' time was spent waiting for another rank: ask for a straggler report",
                        milliseconds(others))};
  }
  std::vector<std::string> advice;
  for (const auto& rule : {advise_on_bytes, advise_on_order, advise_on_size, advise_on_count}) {
    if (std::string one = rule(report); !one.empty()) advice.push_back(std::move(one));
  }
  return advice;
}

}  // namespace muster
