#include "muster/transport/link_options.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "muster/io/connect/handshake.h"
#include "muster/transport/link_hello.h"

namespace muster {

Result<LinkOptions> link_options_from_environment() {
  LinkOptions options;
  if (const char* text = std::getenv("MUSTER_TIMEOUT")) {
    const std::string_view seconds(text);
    double value = 0;
    const auto [end, error] = std::from_chars(seconds.data(), seconds.data() + seconds.size(), value);
    if (error != std::errc() || end != seconds.data() + seconds.size() || !(value > 0) || value > 1e9) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("MUSTER_TIMEOUT='{}' is not a number of seconds above 0", seconds));
    }
    options.timeout = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(value));
  }
  if (const char* interface = std::getenv("MUSTER_INTERFACE")) options.interface = interface;
  if (const char* transports = std::getenv("MUSTER_TRANSPORT")) options.transports = transports;
  if (const char* text = std::getenv("MUSTER_TCP_STREAMS")) {
    const std::string_view number(text);
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), options.tcp_streams);
    if (error != std::errc() || end != number.data() + number.size() || options.tcp_streams < 1 ||
        options.tcp_streams > kMaxSubflows) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("MUSTER_TCP_STREAMS='{}' is not a number from 1 to {}", number, kMaxSubflows));
    }
  }
  MUSTER_ASSIGN(options.credentials.secret, secret_from_environment());
  MUSTER_ASSIGN(options.credentials.tls, TlsContext::from_environment());
  return options;
}

}  // namespace muster
