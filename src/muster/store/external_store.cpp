#include "muster/store/external_store.h"

#include "muster/base/random.h"

namespace muster {

Result<Reply> ExternalStore::call(Request request, const Deadline& deadline) {
  MUSTER_TRY(validate(request));
  Result<Reply> reply = carry_out(request, deadline);
  if (reply) return reply;
  if (reply.error().code != ErrorCode::kTimeout) return tl::unexpected(reply.error().in(describe(request)));
  return tl::unexpected(timed_out(request, server()));
}

std::string random_token() {
  Bytes token(16);
  fill_secure_random(token);
  return to_hex(token);
}

Deadline with_grace(const Deadline& deadline) { return Deadline::after(deadline.left() + kCancelGrace); }

}  // namespace muster
