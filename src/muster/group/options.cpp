#include <cstdlib>
#include <utility>

#include "muster/group/group.h"
#include "muster/transport/link_options.h"

namespace muster {

Result<GroupOptions> group_options_from_environment() {
  MUSTER_ASSIGN(LinkOptions links, link_options_from_environment());
  GroupOptions options;
  options.timeout = links.timeout;
  options.interface = std::move(links.interface);
  options.credentials = std::move(links.credentials);
  if (!links.transports.empty()) options.transports = std::move(links.transports);
  options.tcp_streams = links.tcp_streams;
  if (const char* label = std::getenv("MUSTER_HOST_LABEL")) options.host_label = label;
  return options;
}

}  // namespace muster
