#pragma once

#include <string>

#include "muster/rpc/call.h"
#include "muster/torch/exception.h"

namespace muster::rpc {

/// The function of a call threw an exception. what() has its message and, if there is one, the remote traceback.
class RemoteException : public ErrorException {
 public:
  explicit RemoteException(CallError error) : ErrorException(with_traceback(error)), remote_(std::move(error)) {}

  /// The class of the remote exception: "ValueError", "std::out_of_range".
  const std::string& type() const noexcept { return remote_.type; }
  /// Of the remote thread. Empty if the function is in C++.
  const std::string& traceback() const noexcept { return remote_.traceback; }
  const CallError& call_error() const noexcept { return remote_; }

 private:
  // Qualified: the base class has an Error of its own.
  static muster::Error with_traceback(const CallError& error) {
    muster::Error shown = error.error;
    shown.message = error.type + ": " + shown.message + (error.traceback.empty() ? "" : "\n" + error.traceback);
    return shown;
  }
  CallError remote_;
};

/// Throws RemoteException if the function threw, and otherwise as throw_error().
[[noreturn]] void throw_call_error(const CallError& error);

/// The current exception as the error of a call. Must be called in a catch block.
CallError current_call_error();

}  // namespace muster::rpc
