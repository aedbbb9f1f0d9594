#include "muster/transport/transport.h"

#include <fmt/format.h>

#include <algorithm>

namespace muster {

Result<std::vector<Transport>> parse_transports(const std::string& text) {
  std::vector<Transport> allowed;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    const auto transport = std::ranges::find(kTransports, word, [](Transport t) { return name(t); });
    if (transport == std::end(kTransports)) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("'{}' is not a transport; use some of shm, unix and tcp, as in shm,tcp", word));
    }
    allowed.push_back(*transport);
    begin = end + 1;
  }
  return allowed;
}

}  // namespace muster
