#include "muster/torch/exception.h"

namespace muster {

std::exception_ptr to_exception(const Error& error) {
  // Made without a source location: collecting a C++ backtrace costs milliseconds.
  switch (error.code) {
    case ErrorCode::kInvalidArgument:
      return std::make_exception_ptr(ArgumentException(error));
    case ErrorCode::kUnsupported:
      return std::make_exception_ptr(c10::NotImplementedError(error.to_string()));
    default:
      return std::make_exception_ptr(ErrorException(error));
  }
}

void throw_error(const Error& error) { std::rethrow_exception(to_exception(error)); }

}  // namespace muster
