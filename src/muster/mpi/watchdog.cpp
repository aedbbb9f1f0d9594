#include "muster/mpi/watchdog.h"

#include <fmt/format.h>

namespace muster::mpi {
namespace {

/// No deadline is missed by more than this.
constexpr Duration kCheckInterval = 100ms;

}  // namespace

Watchdog::Watchdog(const World& world) : world_(world), thread_([this] { run(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  thread_.join();
}

Watchdog::Guard::Guard(Watchdog& watchdog, Duration timeout, const std::function<std::string()>& what)
    : watchdog_(watchdog) {
  const TimePoint expires = Deadline::after(timeout).when();
  const std::lock_guard lock(watchdog.mutex_);
  watchdog.expires_ = expires;
  watchdog.what_ = what;
  watchdog.why_ = {};
}

/// Waits while the job is being ended, because that calls what().
Watchdog::Guard::~Guard() {
  const std::lock_guard lock(watchdog_.mutex_);
  watchdog_.expires_.reset();
}

void Watchdog::shorten_deadline(Duration timeout, const std::string& why) {
  const TimePoint soon = Deadline::after(timeout).when();
  const std::lock_guard lock(mutex_);
  if (!expires_ || *expires_ <= soon) return;
  expires_ = soon;
  why_ = why;
}

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (expires_ && steady_clock().now() >= *expires_) {
      world_.abort(fmt::format("{}: {}", what_(), why_.empty() ? "it has not ended within its timeout" : why_));
    }
    stop_.wait_for(lock, kCheckInterval);
  }
}

}  // namespace muster::mpi
