#include "muster/torch/c10d/gil_release.h"

// Of libpython, null in a program without it: this library is not linked with Python.
extern "C" {
[[gnu::weak]] void* PyGILState_GetThisThreadState();
[[gnu::weak]] void* PyThreadState_GetUnchecked();   // since Python 3.13
[[gnu::weak]] void* _PyThreadState_UncheckedGet();  // before
[[gnu::weak]] void* PyEval_SaveThread();
[[gnu::weak]] void PyEval_RestoreThread(void* thread_state);
}

namespace muster {

GilRelease::GilRelease() {
  // Not PyGILState_Check(): it is always true in a process that has had several interpreters.
  const auto current = PyThreadState_GetUnchecked != nullptr ? PyThreadState_GetUnchecked : _PyThreadState_UncheckedGet;
  if (current == nullptr) return;
  void* const own = PyGILState_GetThisThreadState();
  if (own != nullptr && current() == own) thread_state_ = PyEval_SaveThread();
}

GilRelease::~GilRelease() {
  if (thread_state_ != nullptr) PyEval_RestoreThread(thread_state_);
}

}  // namespace muster
