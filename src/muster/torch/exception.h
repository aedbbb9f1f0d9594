#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <type_traits>
#include <utility>

#include "muster/base/error.h"

namespace muster {

/// An Error as it leaves the library: thrown by muster::torch, never by the core. A c10::DistBackendError, so code that
/// catches torch's own errors catches it too; in Python it is muster.PeerLostError, muster.TimeoutError and so on.
class ErrorException : public c10::DistBackendError {
 public:
  explicit ErrorException(muster::Error error) : c10::DistBackendError(error.to_string()), error_(std::move(error)) {}
  const muster::Error& error() const noexcept { return error_; }

 private:
  muster::Error error_;  // qualified: the base class has an Error of its own
};

/// A wrong argument. In Python it is a muster.ArgumentError, which is a ValueError and, as torch's other backends raise
/// one or the other for the same mistake, a RuntimeError too.
class ArgumentException : public c10::ValueError {
 public:
  explicit ArgumentException(const muster::Error& error) : c10::ValueError(error.to_string()) {}
};

/// kInvalidArgument becomes ArgumentException, kUnsupported c10::NotImplementedError, all others ErrorException.
std::exception_ptr to_exception(const Error& error);
[[noreturn]] void throw_error(const Error& error);

/// The value, or the error thrown.
template <class T>
T value_or_throw(Result<T> result) {
  if (!result) throw_error(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

}  // namespace muster
