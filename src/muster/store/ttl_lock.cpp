#include "muster/store/ttl_lock.h"

namespace muster {

RenewedTtlLock::RenewedTtlLock(Store store, TimePoint claimed, Duration time_to_live)
    : store_(std::move(store)),
      time_to_live_(time_to_live),
      expires_(claimed + time_to_live),
      thread_([this] { renew_until_ended(); }) {}

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
  return steady_clock().now() < expires_;
}

// The time to live counts from the moment at which the request was sent, because the answer may be late. A request
// without an answer is repeated soon.
void RenewedTtlLock::renew_until_ended() {
  const Duration third = time_to_live_ / 3;
  Duration pause = third;
  std::unique_lock lock(mutex_);
  while (!ended_.wait_for(lock, pause, [this] { return ends_; })) {
    const TimePoint asked = steady_clock().now();
    if (asked >= expires_) return;
    const Deadline deadline = Deadline::after(third).or_sooner(expires_);
    lock.unlock();
    const Result<bool> renewed = store_.renew(deadline);
    lock.lock();
    if (steady_clock().now() >= expires_) return;  // held() may already have returned false
    pause = renewed ? third : third / 20;
    if (renewed && !*renewed) expires_ = asked;  // the store has lost the lock
    if (renewed && *renewed) expires_ = asked + time_to_live_;
  }
}

tl::unexpected<Error> lock_is_held(const Key& name) {
  return fail(ErrorCode::kAlreadyExists, "another process holds the lock \"" + name + "\"");
}

Result<std::unique_ptr<TtlLock>> Store::claim(const Key&, ByteView, Duration, const Deadline&) {
  return fail(ErrorCode::kUnsupported,
              "this store has no locks, because it ends with the process that serves it; use redis:// or etcd://");
}

Result<std::map<Key, Bytes>> Store::claims(std::string_view, const Deadline&) { return std::map<Key, Bytes>{}; }

}  // namespace muster
