#include "muster/group/shutdown_errors.h"

#include <fmt/format.h>

namespace muster {

Error has_left(const std::string& member, Rank rank) {
  Error error{ErrorCode::kLeft, fmt::format("{} has left the group", member), rank, {}};
  error.phase = GroupPhase::kLeft;
  return error;
}

Error was_shut_down(const std::string& group, Rank self) {
  return {ErrorCode::kAborted, fmt::format("group \"{}\" was shut down here", group), self, {}};
}

}  // namespace muster
