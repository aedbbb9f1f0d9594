#pragma once

#include <functional>
#include <mutex>

namespace muster {

/// Calls back before and after every fork() of this process, in the thread that forks. A forked child does not have the
/// other threads: a lock that one of them held would stay locked, and its data would be inconsistent. So `before` takes
/// the lock, and the other callbacks release it. Thread-safe.
///
/// A fork takes all such locks together. So a thread that holds one must not take another one, and must not fork.
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

/// Holds the mutex over each fork, so that a child finds it free and its data consistent.
inline AtFork hold_over_fork(std::mutex& mutex) {
  return AtFork(AtFork::Callbacks{.before = [&mutex] { mutex.lock(); },
                                  .in_parent = [&mutex] { mutex.unlock(); },
                                  .in_child = [&mutex] { mutex.unlock(); }});
}

}  // namespace muster
