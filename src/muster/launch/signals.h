#pragma once

#include <memory>
#include <vector>

#include "muster/base/error.h"
#include "muster/io/fd.h"

namespace muster {

/// Turns signals into readable bytes, so that a loop can wait for them. One at a time in a process. A signal that is
/// ignored (nohup) stays so.
class SignalPipe {
 public:
  static Result<std::unique_ptr<SignalPipe>> open(std::vector<int> signals);
  /// The signals have their default effect again.
  ~SignalPipe();
  SignalPipe(const SignalPipe&) = delete;
  SignalPipe& operator=(const SignalPipe&) = delete;

  /// Readable when a signal has come.
  int fd() const { return read_.get(); }
  /// The next that has come; 0 when there is none.
  int take();

 private:
  SignalPipe(Fd read, Fd write, std::vector<int> signals)
      : read_(std::move(read)), write_(std::move(write)), signals_(std::move(signals)) {}
  Fd read_, write_;
  std::vector<int> signals_;
};

}  // namespace muster
