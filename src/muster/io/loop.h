#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "muster/base/clock.h"
#include "muster/base/error.h"

namespace muster {

/// Calls back when file descriptors are ready, when timers end and when something was posted.
///
/// A Loop belongs to no thread: whoever calls run_once() drives it, one thread at a time, and every callback runs
/// there. Only post() and wake() may be called from other threads; the rest is for the driving thread (or before there
/// is one). Callbacks may add and remove watches and timers, their own too.
class Loop {
 public:
  using TimerId = uint64_t;
  /// `events` is what epoll reported (EPOLLIN, EPOLLOUT, EPOLLRDHUP, EPOLLERR, EPOLLHUP).
  using Handler = std::function<void(uint32_t events)>;

  static Result<std::unique_ptr<Loop>> create(const Clock& clock = steady_clock());
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  /// Level-triggered; one watch per descriptor (a second is kAlreadyExists). The descriptor is borrowed: unwatch() it
  /// before closing it.
  Result<> watch(int fd, uint32_t events, Handler handler);
  Result<> modify(int fd, uint32_t events);
  void unwatch(int fd);
  bool has_watches() const;

  TimerId at(TimePoint when, std::function<void()> callback);
  TimerId after(Duration delay, std::function<void()> callback) {
    return at(clock().now() + delay, std::move(callback));
  }
  void cancel(TimerId timer);

  /// Runs `task` on the driving thread, in order. Thread-safe.
  void post(std::function<void()> task);
  /// Ends a wait of run_once() on another thread, or the next one if there is none now. Thread-safe.
  void wake();

  /// Called at every turn, before any wait: for what has no descriptor (shared memory). Returns true if it made
  /// progress. While a poller is registered no turn sleeps: it asks again and again, and lets others onto the core.
  using PollerId = uint64_t;
  PollerId add_poller(std::function<bool()> poller);
  void remove_poller(PollerId poller);

  /// One turn: runs what is ready; when nothing is, waits for something until the deadline. True if anything ran.
  bool run_once(const Deadline& deadline);
  /// One turn that never waits.
  bool poll();
  /// Turns until `done()`; kTimeout when the deadline passes first.
  Result<> run_until(const std::function<bool()>& done, const Deadline& deadline);

  /// For who waits elsewhere than in a turn, as a thread does that gives up a lock meanwhile: readable when there are
  /// events or a wake(). And how long there is nothing to do but for events, at most `limit`; zero while pollers want
  /// to be asked.
  int descriptor() const;
  Duration idle_time(Duration limit) const;
  /// The part of a turn that costs no system call. True if one made progress.
  bool run_pollers();

  const Clock& clock() const;

 private:
  struct Impl;
  explicit Loop(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
