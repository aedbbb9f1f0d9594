#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "muster/base/clock.h"
#include "muster/base/error.h"

namespace muster {

/// Calls back when file descriptors are ready, when timers expire and when tasks are posted.
///
/// A Loop belongs to no thread. The thread that calls run_once() drives it and runs the callbacks. Only one thread may
/// drive it at a time. Other threads may only call post() and wake(). Callbacks may add and remove watches and timers,
/// including their own.
class Loop {
 public:
  using TimerId = uint64_t;
  /// `events` are the events that epoll reported (EPOLLIN, EPOLLOUT, EPOLLRDHUP, EPOLLERR, EPOLLHUP).
  using Handler = std::function<void(uint32_t events)>;

  static Result<std::unique_ptr<Loop>> create(const Clock& clock = steady_clock());
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  /// Level-triggered. One watch for each descriptor; a second one is kAlreadyExists. Call unwatch() before you close
  /// the descriptor.
  Result<> watch(int fd, uint32_t events, Handler handler);
  Result<> modify(int fd, uint32_t events);
  void unwatch(int fd);
  bool has_watches() const;

  TimerId at(TimePoint when, std::function<void()> callback);
  TimerId after(Duration delay, std::function<void()> callback) {
    return at(clock().now() + delay, std::move(callback));
  }
  void cancel(TimerId timer);

  /// Runs `task` on the driving thread, in the order of the calls. Thread-safe.
  void post(std::function<void()> task);
  /// Ends the current wait of run_once(), or the next one. Thread-safe.
  void wake();

  /// A poller is called in every turn, before a wait. It is for events without a descriptor (shared memory), and
  /// returns true if it made progress. While there is a poller, turns do not sleep but poll and yield
  /// (base/wait_policy.h).
  /// `rest`, if there is one, removes its poller: from then on its events come by a descriptor.
  using PollerId = uint64_t;
  PollerId add_poller(std::function<bool()> poller, std::function<void()> rest = nullptr);
  void remove_poller(PollerId poller);

  /// One turn: runs the callbacks that are ready, or waits for the next event until the deadline. True if anything ran.
  bool run_once(const Deadline& deadline);
  /// One turn that never waits.
  bool poll();
  /// Runs turns until `done()`. kTimeout if the deadline passes first.
  Result<> run_until(const std::function<bool()>& done, const Deadline& deadline);

  /// For a thread that waits outside of a turn, for example to release a lock meanwhile. The descriptor is readable
  /// when there are events or a wake(). idle_time() is the time until the next timer, at most `limit`; zero while there
  /// are pollers.
  int descriptor() const;
  Duration idle_time(Duration limit) const;
  /// Calls the pollers, without a system call. True if one made progress.
  bool run_pollers();
  /// Makes the pollers rest. True if none is left.
  bool rest();
  /// True while a thread takes one turn after the other, without a sleep. That thread says so.
  bool is_polled() const;
  void set_polled(bool polled);
  /// Another thread was woken, or has woken this one, and may need this core: the next idle turn should yield. For the
  /// thread that polls; take_yield() is true once.
  void yield_soon();
  bool take_yield();

  const Clock& clock() const;

 private:
  struct Impl;
  explicit Loop(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
