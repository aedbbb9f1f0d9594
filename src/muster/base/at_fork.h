#pragma once

#include <functional>
#include <mutex>

namespace muster {

/// Calls back around every fork() of this process, on the thread that forks, for as long as it lives. A forked child
/// has none of the other threads: a lock that one of them held would stay taken there, and what it guards half changed.
/// So `before` takes the lock, and the others give it back. Thread-safe.
///
/// A fork takes all such locks at once. So a thread that holds one may take no other, and must not fork.
class AtFork {
 public:
  struct Callbacks {
    std::function<void()> before, in_parent, in_child;
  };
  explicit AtFork(Callbacks callbacks);
  ~AtFork();
  AtFork(const AtFork&) = delete;
  AtFork& operator=(const AtFork&) = delete;

 private:
  const Callbacks callbacks_;
};

/// A child finds the mutex free.
inline AtFork hold_over_fork(std::mutex& mutex) {
  return AtFork(AtFork::Callbacks{.before = [&mutex] { mutex.lock(); },
                                  .in_parent = [&mutex] { mutex.unlock(); },
                                  .in_child = [&mutex] { mutex.unlock(); }});
}

}  // namespace muster
