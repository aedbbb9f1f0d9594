#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/error.h"
#include "muster/io/address.h"

namespace muster {

/// "scheme://user:password@host:port,host:port/path?name=value&...", with its parts decoded from %XX.
struct Url {
  std::string scheme;
  std::string user, password;
  std::vector<HostPort> hosts;  ///< empty in "redis+unix:///run/redis.sock"
  std::string path;             ///< without its leading slash
  std::map<std::string, std::string> query;

  /// A host without a port gets `default_port`. The message of kInvalidArgument never shows the password.
  static Result<Url> parse(std::string_view text, uint16_t default_port);
  /// Removes `name` from the query and returns its value, or `otherwise` if there is no such parameter.
  std::string take(const std::string& name, const std::string& otherwise);
  /// kInvalidArgument if the query has parameters left that were not taken.
  Result<> finish(std::string_view known) const;
};

/// The URL for messages and logs, with "***" in place of the password.
std::string without_password(std::string_view url);

}  // namespace muster
