#include "muster/torch/reducer/reducer_clock.h"

namespace muster {

void BackwardClock::resume() {
  constexpr Duration kMinForThread = std::chrono::microseconds(100);  // several times the cost of an async call
  const Duration elsewhere = steady_clock().now() - paused_;
  engine_continues_ = elsewhere > kMinForThread;
  current_.waited = current_.waited + elsewhere;  // backward did not wait for reductions in that time
}

void BackwardClock::end(const std::vector<std::shared_ptr<Bucket>>& buckets) {
  std::vector<size_t> bytes;
  current_.buckets.clear();
  for (const auto& bucket : buckets) {
    current_.buckets.push_back(bucket->times);
    bytes.push_back(bucket->bytes());
  }
  current_.ended = steady_clock().now();
  ++current_.iteration;
  last_ = current_;
  recorder_.add(last_, bytes);
}

void BackwardClock::set_plan(const std::vector<std::string>& names, const BucketPlan& plan) {
  last_.buckets.assign(plan.size(), {});
  recorder_.set_plan(names, plan);
}

}  // namespace muster
