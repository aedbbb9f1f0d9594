#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/error.h"

namespace muster {

/// The address of a socket: an IPv4 or IPv6 address with a port, or a Unix socket (a path, or "@name" in the abstract
/// namespace). The text form is "10.0.0.1:29500", "[::1]:29500", "unix:/run/x", "unix:@name".
class Address {
 public:
  /// Parses the text form. The host must be numeric, because parse() does not look names up.
  static Result<Address> parse(std::string_view text);
  static Address from_raw(const sockaddr* address, socklen_t length);
  static Address unix_abstract(std::string_view name);

  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t raw_length() const { return length_; }
  int family() const { return storage_.ss_family; }
  bool is_unix() const { return family() == AF_UNIX; }
  bool is_loopback() const;
  /// 0 for a Unix socket.
  uint16_t port() const;
  Address with_port(uint16_t port) const;
  /// The host without the port: "10.0.0.1", "::1"; the path for a Unix socket.
  std::string host() const;
  std::string to_string() const;
  friend bool operator==(const Address& a, const Address& b) { return a.to_string() == b.to_string(); }

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

/// Resolves `host`, a name or a numeric address, to IPv4 and IPv6 addresses. An unknown host is kUnavailable, with its
/// name. May block in the resolver, so call it off the hot path.
Result<std::vector<Address>> resolve(const std::string& host, uint16_t port);

struct HostPort {
  std::string host;
  uint16_t port = 0;
};
/// Splits "host:port", "[v6]:port" or "host" (its port is `default_port`). Other text is kInvalidArgument.
Result<HostPort> parse_host_port(std::string_view text, uint16_t default_port);

/// The address to bind for "eth0" (an interface's name) or "10.0.0.1" (one of this host's addresses). An unknown
/// interface is kInvalidArgument, with a list of the existing ones.
Result<Address> interface_address(const std::string& interface);
/// The local address from which `target` is reached (the address of a connected UDP socket; no packet is sent).
Result<Address> local_address_towards(const Address& target);

}  // namespace muster
