#pragma once

#include <functional>

#include "muster/io/loop.h"

namespace muster {

/// A timer of a loop. It is cancelled when this object is destroyed.
class Timer {
 public:
  explicit Timer(Loop& loop) : loop_(loop) {}
  ~Timer() { stop(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  /// Replaces a running timer.
  void start(Duration delay, std::function<void()> callback) {
    stop();
    id_ = loop_.after(delay, [this, callback = std::move(callback)] {
      id_ = 0;
      callback();
    });
  }
  void stop() {
    if (id_ != 0) loop_.cancel(id_);
    id_ = 0;
  }

 private:
  Loop& loop_;
  Loop::TimerId id_ = 0;
};

}  // namespace muster
