#pragma once

#include <unistd.h>

#include <atomic>
#include <new>

namespace muster {

/// A base of final classes whose objects have threads, links or locks: `class Session final : public
/// ProcessOwned<Session>`. A forked child inherits the memory of such an object, but not its threads. There the
/// destructor would wait for these threads forever, or tell the peers that the parent has left. So `delete` in a child
/// leaves an inherited object as it is.
template <class Derived>
class ProcessOwned {
 public:
  static void operator delete(ProcessOwned* object, std::destroying_delete_t) {
    if (object->inherited()) {
      // A list of inherited objects, so that leak checkers can reach them.
      static std::atomic<ProcessOwned*> all_inherited = nullptr;
      object->next_inherited_ = all_inherited.exchange(object);
      return;
    }
    Derived* const derived = static_cast<Derived*>(object);
    derived->~Derived();
    ::operator delete(derived);
  }

 protected:
  ~ProcessOwned() = default;
  /// True in a forked child of the process that made the object.
  bool inherited() const { return getpid() != process_; }

 private:
  const pid_t process_ = getpid();
  ProcessOwned* next_inherited_ = nullptr;
};

}  // namespace muster
