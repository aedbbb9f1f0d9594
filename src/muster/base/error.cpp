#include "muster/base/error.h"

#include <cerrno>
#include <system_error>

namespace muster {

const char* name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInternal:
      return "internal error";
    case ErrorCode::kInvalidArgument:
      return "invalid argument";
    case ErrorCode::kTimeout:
      return "timeout";
    case ErrorCode::kPeerLost:
      return "peer lost";
    case ErrorCode::kAborted:
      return "aborted";
    case ErrorCode::kMismatch:
      return "mismatch";
    case ErrorCode::kAuthentication:
      return "authentication failed";
    case ErrorCode::kProtocol:
      return "protocol error";
    case ErrorCode::kNotFound:
      return "not found";
    case ErrorCode::kAlreadyExists:
      return "already exists";
    case ErrorCode::kUnavailable:
      return "unavailable";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kResourceExhausted:
      return "resource exhausted";
    case ErrorCode::kIo:
      return "I/O error";
    case ErrorCode::kLeft:
      return "peer left";
  }
  return "unknown error";
}

std::string Error::to_string() const {
  std::string text = std::string(name(code)) + ": " + message;
  if (!context.empty()) text += " (during " + context + ")";
  return text;
}

Error Error::in(std::string during) const {
  Error copy = *this;
  if (copy.context.empty()) copy.context = std::move(during);
  return copy;
}

tl::unexpected<Error> fail(ErrorCode code, std::string message, Rank rank) {
  return tl::unexpected(Error{code, std::move(message), rank, {}});
}

tl::unexpected<Error> fail_errno(int error_number, const std::string& what) {
  ErrorCode code = ErrorCode::kIo;
  switch (error_number) {
    case EADDRINUSE:
    case EADDRNOTAVAIL:
    case ECONNREFUSED:
    case EHOSTUNREACH:
    case ENETUNREACH:
      code = ErrorCode::kUnavailable;
      break;
    case ETIMEDOUT:
      code = ErrorCode::kTimeout;
      break;
    case ECONNRESET:
    case EPIPE:
      code = ErrorCode::kPeerLost;
      break;
    case EMFILE:
    case ENFILE:
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case ENOMEM:
      code = ErrorCode::kResourceExhausted;
      break;
    default:
      break;
  }
  return tl::unexpected(
      Error{code, what + ": " + std::generic_category().message(error_number), kNoRank, {}, error_number});
}

}  // namespace muster
