#pragma once

namespace muster {

/// Releases the GIL while the object lives, if this thread holds it. Calls from Python release it before they come
/// here, but a compiled package that Python runs does not. A progress thread may need the GIL to drop a tensor, and the
/// call would wait for that thread forever. Does nothing in programs without Python.
class GilRelease {
 public:
  GilRelease();
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  void* thread_state_ = nullptr;
};

}  // namespace muster
