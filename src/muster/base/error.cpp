#include "muster/base/error.h"

#include <cerrno>
#include <iterator>
#include <system_error>

namespace muster {

const char* name(ErrorCode code) {
  static constexpr const char* kNames[] = {
      "internal error",        "invalid argument", "timeout",   "peer lost",      "aborted",     "mismatch",
      "authentication failed", "protocol error",   "not found", "already exists", "unavailable", "unsupported",
      "resource exhausted",    "I/O error",        "peer left"};
  static_assert(std::size(kNames) == static_cast<size_t>(kLastErrorCode) + 1);
  return code <= kLastErrorCode ? kNames[static_cast<size_t>(code)] : "unknown error";
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
