#include "muster/group/shutdown_errors.h"

#include <fmt/format.h>

namespace muster {

Error has_left(const std::string& who, Rank rank) {
  return {ErrorCode::kLeft, fmt::format("{} has left the group", who), rank, {}};
}

bool had_formed(const Error& why) { return why.code == ErrorCode::kLeft || !why.context.empty(); }

Error was_shut_down(const std::string& group, Rank self) {
  return {ErrorCode::kAborted, fmt::format("group \"{}\" was shut down here", group), self, {}};
}

}  // namespace muster
