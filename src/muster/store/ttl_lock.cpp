#include "muster/store/ttl_lock.h"

namespace muster {

RenewedTtlLock::RenewedTtlLock(Store store, TimePoint claimed, Duration time_to_live)
    : store_(std::move(store)),
      time_to_live_(time_to_live),
      lives_until_(claimed + time_to_live),
      thread_([this] { keep_up(); }) {}

RenewedTtlLock::~RenewedTtlLock() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  ended_.notify_one();
  thread_.join();
  if (held()) store_.release(Deadline::after(time_to_live_ / 3));
}

bool RenewedTtlLock::held() const {
  const std::lock_guard lock(mutex_);
  return steady_clock().now() < lives_until_;
}

// An answer may be late, so the time to live counts from when the question was sent. Where none came, it is asked again
// soon: the store may have stood still for a moment only.
void RenewedTtlLock::keep_up() {
  const Duration third = time_to_live_ / 3;
  Duration pause = third;
  std::unique_lock lock(mutex_);
  while (!ended_.wait_for(lock, pause, [this] { return ends_; })) {
    const TimePoint asked = steady_clock().now();
    if (asked >= lives_until_) return;
    const Deadline deadline = Deadline::after(third).or_sooner(lives_until_);
    lock.unlock();
    const Result<bool> renewed = store_.renew(deadline);
    lock.lock();
    if (steady_clock().now() >= lives_until_) return;  // as held() may have said already
    pause = renewed ? third : third / 20;
    if (renewed && !*renewed) lives_until_ = asked;  // it is another's, or nobody's
    if (renewed && *renewed) lives_until_ = asked + time_to_live_;
  }
}

Result<std::unique_ptr<TtlLock>> Store::claim(const Key&, ByteView, Duration, const Deadline&) {
  return fail(ErrorCode::kUnsupported,
              "this store keeps no claims, for it ends with the process that serves it; use redis:// or etcd://");
}

Result<std::map<Key, Bytes>> Store::claims(std::string_view, const Deadline&) { return std::map<Key, Bytes>{}; }

}  // namespace muster
