// What the threads of an agent need to use Python.
#pragma once

#include <memory>

#include "bindings.h"

namespace muster::python {

inline bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

/// The GIL for a thread of the agent. The thread keeps its Python state between calls, because making one costs more
/// than a small call.
class Gil {
 public:
  Gil() { PyEval_RestoreThread(state().thread); }
  ~Gil() { state().thread = PyEval_SaveThread(); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  struct State {
    State() : before(PyGILState_Ensure()), thread(PyEval_SaveThread()) {}
    ~State() {
      if (Py_IsInitialized() == 0 || is_finalizing()) return;
      PyEval_RestoreThread(thread);
      PyGILState_Release(before);
    }
    State(const State&) = delete;
    PyGILState_STATE before;
    PyThreadState* thread;
  };
  static State& state() {
    thread_local State state;
    return state;
  }
};

/// Releases a reference of Python wherever the last copy is dropped.
struct Releaser {
  void operator()(PyObject* object) const {
    if (Py_IsInitialized() == 0 || is_finalizing()) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(object);
  }
};
inline std::shared_ptr<PyObject> shared(py::object object) { return {object.release().ptr(), Releaser()}; }

}  // namespace muster::python
