#pragma once

#include <cstdint>
#include <string>
#include <tl/expected.hpp>

namespace muster {

/// A process's number within a group, 0 to size - 1.
using Rank = int;
inline constexpr Rank kNoRank = -1;

/// The kind of a failure. Sent on the wire: append only, never renumber.
enum class ErrorCode : uint8_t {
  kInternal = 0,
  kInvalidArgument = 1,
  kTimeout = 2,
  kPeerLost = 3,
  kAborted = 4,
  kMismatch = 5,
  kAuthentication = 6,
  kProtocol = 7,
  kNotFound = 8,
  kAlreadyExists = 9,
  kUnavailable = 10,
  kUnsupported = 11,
  kResourceExhausted = 12,
  kIo = 13,
  kLeft = 14,  ///< a peer left in an orderly way
};
inline constexpr ErrorCode kLastErrorCode = ErrorCode::kLeft;

const char* name(ErrorCode code);

/// The state of the group at the rank that reports an error. Sent on the wire: append only, never renumber.
enum class GroupPhase : uint8_t { kForming = 0, kRunning = 1, kLeft = 2 };

/// An expected failure. `message` is one sentence: what happened, at which rank, and what to try. `context` names the
/// call that failed at the rank that found it ("all_reduce #41 (float32[4], group \"default\")"); outer layers add it.
struct Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
  Rank rank = kNoRank;  ///< the rank that caused it, if known
  std::string context;
  int system_error = 0;                     ///< the errno behind the error, 0 for none; not sent on the wire
  GroupPhase phase = GroupPhase::kForming;  ///< of the rank that reports it
  Rank reported_by = kNoRank;               ///< the peer whose link brought it; kNoRank: found by this rank itself

  /// "peer lost: rank 3 closed its link (during all_reduce #41)".
  std::string to_string() const;
  /// The same error with `during` as its context, unless it has one already.
  Error in(std::string during) const;
};

/// A value or an Error. Every function of the core that can fail returns one; the core does not throw.
template <class T = void>
using Result = tl::expected<T, Error>;

tl::unexpected<Error> fail(ErrorCode code, std::string message, Rank rank = kNoRank);
/// An error from errno: "cannot bind 127.0.0.1:80: Permission denied". EADDRINUSE and similar errors become
/// kUnavailable.
tl::unexpected<Error> fail_errno(int error_number, const std::string& what);

}  // namespace muster

#define MUSTER_CONCAT_(a, b) a##b
#define MUSTER_CONCAT(a, b) MUSTER_CONCAT_(a, b)

/// Returns the error of `expression` from the enclosing function, if it has one.
#define MUSTER_TRY(expression)                                                     \
  do {                                                                             \
    auto muster_result_ = (expression);                                            \
    if (!muster_result_) return tl::unexpected(std::move(muster_result_).error()); \
  } while (false)

/// `MUSTER_ASSIGN(auto fd, open_it());` binds the value, or returns the error.
#define MUSTER_ASSIGN(target, expression) MUSTER_ASSIGN_(MUSTER_CONCAT(muster_assign_, __LINE__), target, expression)
#define MUSTER_ASSIGN_(temporary, target, expression)                  \
  auto temporary = (expression);                                       \
  if (!temporary) return tl::unexpected(std::move(temporary).error()); \
  target = std::move(*temporary)
