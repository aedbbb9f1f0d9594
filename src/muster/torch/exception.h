#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <type_traits>
#include <utility>

#include "muster/base/error.h"

namespace muster {

/// An Error as an exception: thrown by muster::torch, never by the core. It is a c10::DistBackendError, so that code
/// that catches torch's errors catches it too. In Python it becomes muster.PeerLostError, muster.TimeoutError and so
/// on.
class ErrorException : public c10::DistBackendError {
 public:
  explicit ErrorException(muster::Error error) : c10::DistBackendError(error.to_string()), error_(std::move(error)) {}
  const muster::Error& error() const noexcept { return error_; }

 private:
  muster::Error error_;  // qualified: the base class has an Error of its own
};

/// A wrong argument. In Python it becomes a muster.ArgumentError: a ValueError and a RuntimeError, because torch's
/// other backends raise one or the other for the same mistake.
class ArgumentException : public c10::ValueError {
 public:
  explicit ArgumentException(const muster::Error& error) : c10::ValueError(error.to_string()) {}
};

/// kInvalidArgument becomes ArgumentException, kUnsupported c10::NotImplementedError, all others ErrorException.
std::exception_ptr to_exception(const Error& error);
[[noreturn]] void throw_error(const Error& error);

/// Returns the value or throws the error.
template <class T>
T value_or_throw(Result<T> result) {
  if (!result) throw_error(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

}  // namespace muster
