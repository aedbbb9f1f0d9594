#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "muster/io/fd.h"
#include "muster/io/loop.h"

namespace muster {

/// Turns signals into callbacks on a loop. At most one object exists in a process at a time. A signal that is ignored
/// (nohup) stays ignored, except SIGCHLD: if it were ignored, no child could be reaped.
class SignalPipe {
 public:
  /// `signaled` is called for each of `signals`. `child_ended` is called once for any number of children that have
  /// ended.
  static Result<std::unique_ptr<SignalPipe>> open(Loop& loop, std::vector<int> signals,
                                                  std::function<void(int)> signaled, std::function<void()> child_ended);
  /// Restores the default effect of the signals.
  ~SignalPipe();
  SignalPipe(const SignalPipe&) = delete;
  SignalPipe& operator=(const SignalPipe&) = delete;

 private:
  SignalPipe(Loop& loop, Fd read, Fd write, std::vector<int> signals)
      : loop_(loop), read_(std::move(read)), write_(std::move(write)), signals_(std::move(signals)) {}
  void dispatch(const std::function<void(int)>& signaled, const std::function<void()>& child_ended) const;

  Loop& loop_;
  Fd read_, write_;
  std::vector<int> signals_;
};

}  // namespace muster
