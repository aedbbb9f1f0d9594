#include "muster/base/at_fork.h"

#include <pthread.h>

#include <vector>

#include "muster/base/check.h"

namespace muster {
namespace {

/// All AtFork objects. A fork holds this lock too.
struct Registry {
  std::mutex mutex;
  std::vector<const AtFork::Callbacks*> all;
};

Registry& registry() {
  static Registry* const instance = [] {
    auto* const made = new Registry;  // never destroyed: a program may fork to its very end
    const int failed = pthread_atfork(
        [] {
          registry().mutex.lock();
          for (const auto* each : registry().all) each->before();
        },
        [] {
          for (const auto* each : registry().all) each->in_parent();
          registry().mutex.unlock();
        },
        [] {
          for (const auto* each : registry().all) each->in_child();
          registry().mutex.unlock();
        });
    MUSTER_CHECK(failed == 0, "pthread_atfork failed: no memory");
    return made;
  }();
  return *instance;
}

}  // namespace

AtFork::AtFork(Callbacks callbacks) : callbacks_(std::move(callbacks)) {
  const std::lock_guard lock(registry().mutex);
  registry().all.push_back(&callbacks_);
}

AtFork::~AtFork() {
  const std::lock_guard lock(registry().mutex);
  std::erase(registry().all, &callbacks_);
}

}  // namespace muster
