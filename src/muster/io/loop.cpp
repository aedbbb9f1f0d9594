#include "muster/io/loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "muster/base/check.h"
#include "muster/base/wait_policy.h"
#include "muster/io/fd.h"

namespace muster {
namespace {

constexpr size_t kEventsPerTurn = 512;

/// epoll's user data: the descriptor and the generation of its watch. The generation tells an event of an earlier watch
/// on the same descriptor from one of the current watch.
uint64_t pack(int fd, uint32_t generation) {
  return static_cast<uint64_t>(generation) << 32 | static_cast<uint32_t>(fd);
}

// A wait of this length or longer uses no kernel timer. Setting one would be a large part of the cost of a small
// message.
constexpr Duration kForever = std::chrono::hours(300 * 24);

/// Waits with a timeout in nanoseconds if the kernel can (Linux 5.11). Otherwise rounds the timeout up to milliseconds.
int wait_for_events(int epoll, std::span<epoll_event> events, Duration timeout) {
  // Relaxed, because it is only a hint: a stale value costs one failed call.
  static std::atomic<bool> has_pwait2{true};
  const int64_t ns = std::max<int64_t>(timeout.count(), 0);
  if (timeout >= kForever) return epoll_wait(epoll, events.data(), static_cast<int>(events.size()), -1);
  if (ns > 0 && has_pwait2.load(std::memory_order_relaxed)) {
    const timespec spec{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
    // Not epoll_pwait2(): glibc has it only since 2.35.
    const int n = static_cast<int>(
        ::syscall(__NR_epoll_pwait2, epoll, events.data(), static_cast<int>(events.size()), &spec, nullptr, 0));
    if (n >= 0 || errno != ENOSYS) return n;
    has_pwait2.store(false, std::memory_order_relaxed);
  }
  const int64_t ms = std::chrono::ceil<std::chrono::milliseconds>(Duration(ns)).count();
  return epoll_wait(epoll, events.data(), static_cast<int>(events.size()),
                    static_cast<int>(std::min<int64_t>(ms, 1'000'000)));
}

}  // namespace

/// It has many fields because one turn serves five sources of events: descriptors, timers, pollers, tasks, wake-ups.
struct Loop::Impl {
  /// The loop that this thread is driving. A task that this thread posts to it needs no wake-up.
  static thread_local Impl* turning;

  struct Watch {
    uint32_t generation = 0;
    uint32_t events = 0;
    // Shared, so that a handler which unwatches its own descriptor survives until it returns.
    std::shared_ptr<Handler> handler;
  };
  using Task = std::function<void()>;
  using TimerKey = std::pair<TimePoint, TimerId>;  // equal times fire in the order in which they were set

  Watch* find(int fd) {
    if (fd < 0 || static_cast<size_t>(fd) >= watches.size() || !watches[fd].handler) return nullptr;
    return &watches[fd];
  }

  /// epoll_ctl(). False with errno if it fails.
  bool control(int operation, int fd, uint32_t events, uint32_t generation) const {
    epoll_event wanted{.events = events, .data = {.u64 = pack(fd, generation)}};
    return epoll_ctl(epoll.get(), operation, fd, &wanted) == 0;
  }

  bool run_tasks() {
    if (!has_tasks.load(std::memory_order_acquire)) return false;
    std::vector<Task> taken;
    {
      const std::lock_guard lock(mutex);
      taken.swap(tasks);
      has_tasks.store(false, std::memory_order_relaxed);
    }
    for (auto& task : taken) {
      task();
      task = nullptr;  // frees the objects of the task now, not after the last task
    }
    return !taken.empty();
  }

  // Runs the timers that were set and due when the turn began. So a timer that sets another one for "now" cannot block
  // the loop.
  bool run_timers() {
    if (timers.empty()) return false;
    const TimePoint now = clock->now();
    const TimerId newest = last_timer;
    bool ran = false;
    auto it = timers.begin();
    while (it != timers.end() && it->first.first <= now) {
      const TimerKey key = it->first;
      if (key.second > newest) {
        ++it;
        continue;
      }
      const Task callback = std::move(it->second);
      timers.erase(it);
      timer_times.erase(key.second);
      callback();
      ran = true;
      it = timers.upper_bound(key);
    }
    return ran;
  }

  bool run_pollers() {
    bool progress = false;
    for_each_poller([&](Poller& poller) { progress |= poller.poll(); });
    return progress;
  }

  /// Pollers may add and remove pollers. New ones are left out.
  template <class F>
  void for_each_poller(const F& call) {
    const PollerId newest = last_poller;
    for (auto it = pollers.begin(); it != pollers.end() && it->first <= newest;) {
      const PollerId id = it->first;
      const auto poller = it->second;
      call(*poller);
      it = pollers.upper_bound(id);
    }
  }

  void wake() {
    if (wake_pending.exchange(true, std::memory_order_acq_rel)) return;
    const uint64_t one = 1;
    const ssize_t written = ::write(event.get(), &one, sizeof one);
    MUSTER_CHECK(written == sizeof one || errno == EAGAIN, "cannot write an eventfd");
  }

  void drain_wakeups() {
    uint64_t count;
    while (::read(event.get(), &count, sizeof count) < 0 && errno == EINTR) {
    }
    wake_pending.exchange(false, std::memory_order_acq_rel);
    woken = true;
  }

  bool dispatch(const epoll_event& reported) {
    const int fd = static_cast<int>(reported.data.u64 & 0xffffffff);
    if (fd == event.get()) {
      drain_wakeups();
      return false;
    }
    const Watch* watch = find(fd);
    if (watch == nullptr || pack(fd, watch->generation) != reported.data.u64) return false;
    const uint32_t events = reported.events & (watch->events | EPOLLERR | EPOLLHUP);
    if (events == 0) return false;  // a callback of this turn has modified the watch
    const auto handler = watch->handler;
    (*handler)(events);
    return true;
  }

  bool run_events(Duration timeout) {
    epoll_event events[kEventsPerTurn];
    const int count = wait_for_events(epoll.get(), events, timeout);
    MUSTER_CHECK(count >= 0 || errno == EINTR, "epoll_wait failed with errno " + std::to_string(errno));
    bool ran = false;
    for (int i = 0; i < count; ++i) ran |= dispatch(events[i]);
    return ran;
  }

  Duration longest_wait(Duration left) const {
    if (!timers.empty()) left = std::min(left, timers.begin()->first.first - clock->now());
    return std::max(left, Duration::zero());
  }

  const Clock* clock = nullptr;
  Fd epoll, event;

  std::vector<Watch> watches;  // indexed by descriptor; an entry without a handler is not watched
  uint32_t last_generation = 0;
  std::map<TimerKey, Task> timers;
  std::unordered_map<TimerId, TimePoint> timer_times;
  TimerId last_timer = 0;
  struct Poller {
    std::function<bool()> poll;
    std::function<void()> rest;
  };
  std::map<PollerId, std::shared_ptr<Poller>> pollers;  // shared for the same reason as handlers
  PollerId last_poller = 0;
  bool woken = false;
  bool polled = false;
  bool yields = false;
  PollWait poll_wait{kLoopPolls};

  // Wake-up from other threads. Invariant: if wake_pending is set, the eventfd is written or will be, so a turn that
  // waits now or later ends. wake() sets it by exchange (acq_rel), and only the thread that changed it writes the
  // eventfd. drain_wakeups() reads the eventfd first and clears the flag second: a wake() between the two finds the
  // flag set and does not write, but the turn that drains runs tasks afterwards. The exchange there acquires what the
  // waking threads wrote before their wake().
  //
  // post() adds the task under the mutex, stores has_tasks with release, and then calls wake(). has_tasks lets a turn
  // without tasks skip the mutex; the mutex orders the tasks themselves. run_once() may read has_tasks relaxed before
  // it waits: if it misses a task of another thread, the wake() that follows ends the wait.
  std::atomic<bool> wake_pending{false};
  std::mutex mutex;
  std::vector<Task> tasks;  // guarded by mutex
  std::atomic<bool> has_tasks{false};
};

thread_local Loop::Impl* Loop::Impl::turning = nullptr;

Loop::Loop(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Loop::~Loop() = default;

Result<std::unique_ptr<Loop>> Loop::create(const Clock& clock) {
  auto impl = std::make_unique<Impl>();
  impl->clock = &clock;
  impl->epoll.reset(epoll_create1(EPOLL_CLOEXEC));
  if (!impl->epoll) return fail_errno(errno, "cannot create an epoll descriptor");
  impl->event.reset(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!impl->event) return fail_errno(errno, "cannot create an eventfd");
  if (!impl->control(EPOLL_CTL_ADD, impl->event.get(), EPOLLIN, 0)) return fail_errno(errno, "cannot watch an eventfd");
  return std::unique_ptr<Loop>(new Loop(std::move(impl)));
}

Result<> Loop::watch(int fd, uint32_t events, Handler handler) {
  MUSTER_CHECK(handler != nullptr, "a watch needs a handler");
  if (impl_->find(fd) != nullptr) {
    return fail(ErrorCode::kAlreadyExists, "descriptor " + std::to_string(fd) + " is watched already");
  }
  const uint32_t generation = ++impl_->last_generation;
  if (!impl_->control(EPOLL_CTL_ADD, fd, events, generation)) {
    return fail_errno(errno, "cannot watch descriptor " + std::to_string(fd));
  }
  if (static_cast<size_t>(fd) >= impl_->watches.size()) impl_->watches.resize(fd + 1);
  impl_->watches[fd] = {generation, events, std::make_shared<Handler>(std::move(handler))};
  return {};
}

Result<> Loop::modify(int fd, uint32_t events) {
  auto* watch = impl_->find(fd);
  if (watch == nullptr) return fail(ErrorCode::kNotFound, "descriptor " + std::to_string(fd) + " is not watched");
  if (watch->events == events) return {};
  if (!impl_->control(EPOLL_CTL_MOD, fd, events, watch->generation)) {
    return fail_errno(errno, "cannot change what descriptor " + std::to_string(fd) + " is watched for");
  }
  watch->events = events;
  return {};
}

bool Loop::has_watches() const {
  return std::any_of(impl_->watches.begin(), impl_->watches.end(), [](const auto& watch) { return watch.handler; });
}

void Loop::unwatch(int fd) {
  auto* watch = impl_->find(fd);
  if (watch == nullptr) return;
  epoll_ctl(impl_->epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
  watch->handler.reset();
}

Loop::TimerId Loop::at(TimePoint when, std::function<void()> callback) {
  const TimerId id = ++impl_->last_timer;
  impl_->timers.emplace(Impl::TimerKey{when, id}, std::move(callback));
  impl_->timer_times.emplace(id, when);
  return id;
}

void Loop::cancel(TimerId timer) {
  const auto it = impl_->timer_times.find(timer);
  if (it == impl_->timer_times.end()) return;
  impl_->timers.erase({it->second, timer});
  impl_->timer_times.erase(it);
}

void Loop::post(std::function<void()> task) {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->tasks.push_back(std::move(task));
    impl_->has_tasks.store(true, std::memory_order_release);
  }
  if (Impl::turning != impl_.get()) impl_->wake();
}

void Loop::wake() { impl_->wake(); }

Loop::PollerId Loop::add_poller(std::function<bool()> poller, std::function<void()> rest) {
  const PollerId id = ++impl_->last_poller;
  impl_->pollers.emplace(id, std::make_shared<Impl::Poller>(std::move(poller), std::move(rest)));
  return id;
}

void Loop::remove_poller(PollerId poller) { impl_->pollers.erase(poller); }

bool Loop::run_once(const Deadline& deadline) {
  Impl* const outer = std::exchange(Impl::turning, impl_.get());
  bool ran = false;
  impl_->woken = false;
  impl_->poll_wait.reset();
  for (;;) {
    ran |= impl_->run_pollers();
    ran |= impl_->run_tasks();
    ran |= impl_->run_timers();
    const bool spins = !impl_->pollers.empty();
    const bool more = ran || spins || impl_->has_tasks.load(std::memory_order_relaxed);
    ran |= impl_->run_events(more ? Duration::zero() : impl_->longest_wait(deadline.left()));
    ran |= impl_->run_tasks();
    if (ran || impl_->woken || deadline.passed()) break;
    if (spins) impl_->poll_wait.idle();
  }
  Impl::turning = outer;
  return ran;
}

bool Loop::poll() { return run_once(Deadline::at(impl_->clock->now(), *impl_->clock)); }

Result<> Loop::run_until(const std::function<bool()>& done, const Deadline& deadline) {
  while (!done()) {
    if (deadline.passed()) return fail(ErrorCode::kTimeout, "the deadline passed before the awaited event");
    run_once(deadline);
  }
  return {};
}

int Loop::descriptor() const { return impl_->epoll.get(); }

Duration Loop::idle_time(Duration limit) const {
  if (!impl_->pollers.empty() || impl_->has_tasks.load(std::memory_order_acquire)) return Duration::zero();
  return impl_->longest_wait(limit);
}

bool Loop::run_pollers() { return impl_->run_pollers(); }
bool Loop::is_polled() const { return impl_->polled; }
void Loop::set_polled(bool polled) { impl_->polled = polled; }
void Loop::yield_soon() { impl_->yields = true; }
bool Loop::take_yield() { return std::exchange(impl_->yields, false); }

bool Loop::rest() {
  impl_->for_each_poller([](Impl::Poller& poller) {
    if (poller.rest) poller.rest();
  });
  return impl_->pollers.empty();
}

const Clock& Loop::clock() const { return *impl_->clock; }

}  // namespace muster
