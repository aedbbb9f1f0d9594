#pragma once

#include <string>

#include "muster/store/state/state.h"
#include "muster/store/store.h"

namespace muster {

/// A store in a server that is not muster's.
class ExternalStore : public Store {
 public:
  /// Every error names the request. A timeout names the server too.
  Result<Reply> call(Request request, const Deadline& deadline) final;

 protected:
  virtual Result<Reply> carry_out(Request& request, const Deadline& deadline) = 0;
  /// For messages: "Redis at host:port".
  virtual std::string server() const = 0;
};

/// How long a call waits for the answer to its cancellation. The wait is needed because the call may have taken a queue
/// item, or may have been released at a barrier.
inline constexpr Duration kCancelGrace = std::chrono::seconds(1);
/// Extends the deadline by kCancelGrace, for an exchange with a server that must not be given up in the middle.
Deadline with_grace(const Deadline& deadline);
/// Returns 32 random hexadecimal digits, so two calls never return the same token in practice.
std::string random_token();

}  // namespace muster
