#pragma once

namespace muster {

/// Lets other threads run Python while the object lives, if this thread holds Python's lock (the GIL). Calls from
/// Python release it before they come here, but a compiled package that Python runs does not. A progress thread may
/// need it to drop a tensor, and the call would wait for that thread forever. Does nothing in programs without Python.
class UnlockedPython {
 public:
  UnlockedPython();
  ~UnlockedPython();
  UnlockedPython(const UnlockedPython&) = delete;
  UnlockedPython& operator=(const UnlockedPython&) = delete;

 private:
  void* thread_state_ = nullptr;
};

}  // namespace muster
