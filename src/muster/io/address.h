#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/error.h"

namespace muster {

/// Where a socket is: an IPv4 or IPv6 address with a port, or a Unix socket (a path, or "@name" in the abstract
/// namespace). A value; text form is "10.0.0.1:29500", "[::1]:29500", "unix:/run/x", "unix:@name".
class Address {
 public:
  /// Reads the text form, numeric hosts only. Never looks a name up.
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

/// Looks `host` up (numeric or name), IPv4 and IPv6. kUnavailable names the host when it is unknown. May block in the
/// resolver; call it off the hot path.
Result<std::vector<Address>> resolve(const std::string& host, uint16_t port);

/// Splits "host:port", "[v6]:port" or "host" (then `default_port`). kInvalidArgument says what is wrong.
struct HostPort {
  std::string host;
  uint16_t port = 0;
};
Result<HostPort> parse_host_port(std::string_view text, uint16_t default_port);

/// The address to bind for "eth0" (an interface's name) or "10.0.0.1" (one of this host's addresses). An unknown
/// interface is kInvalidArgument and lists those that exist.
Result<Address> interface_address(const std::string& interface);
/// The local address from which `target` is reached (a connected UDP socket's name: no packet is sent).
Result<Address> local_address_towards(const Address& target);

}  // namespace muster
