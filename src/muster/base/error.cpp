#include "muster/base/error.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <system_error>
#include <utility>

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
  using enum ErrorCode;
  static constexpr std::pair<int, ErrorCode> kCodes[] = {
      {EADDRINUSE, kUnavailable},   {EADDRNOTAVAIL, kUnavailable},
      {ECONNREFUSED, kUnavailable}, {EHOSTUNREACH, kUnavailable},
      {ENETUNREACH, kUnavailable},  {ETIMEDOUT, kTimeout},
      {ECONNRESET, kPeerLost},      {EPIPE, kPeerLost},
      {EMFILE, kResourceExhausted}, {ENFILE, kResourceExhausted},
      {ENOSPC, kResourceExhausted}, {EDQUOT, kResourceExhausted},
      {EFBIG, kResourceExhausted},  {ENOMEM, kResourceExhausted},
  };
  const auto* const known = std::ranges::find(kCodes, error_number, &std::pair<int, ErrorCode>::first);
  const ErrorCode code = known == std::end(kCodes) ? kIo : known->second;
  return tl::unexpected(
      Error{code, what + ": " + std::generic_category().message(error_number), kNoRank, {}, error_number});
}

}  // namespace muster
