#include "muster/torch/c10d/unlocked_python.h"

// Of libpython, null in a program without it: this library is not linked with Python.
extern "C" {
[[gnu::weak]] int PyGILState_Check();
[[gnu::weak]] void* PyGILState_GetThisThreadState();
[[gnu::weak]] void* PyEval_SaveThread();
[[gnu::weak]] void PyEval_RestoreThread(void* thread_state);
[[gnu::weak]] int Py_IsInitialized();
}

namespace muster {

UnlockedPython::UnlockedPython() {
  if (Py_IsInitialized == nullptr || Py_IsInitialized() == 0) return;
  // PyGILState_Check() alone is always true in a process with several interpreters.
  if (PyGILState_GetThisThreadState() != nullptr && PyGILState_Check() != 0) thread_state_ = PyEval_SaveThread();
}

UnlockedPython::~UnlockedPython() {
  if (thread_state_ != nullptr) PyEval_RestoreThread(thread_state_);
}

}  // namespace muster
