#include "muster/io/address.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <optional>

namespace muster {
namespace {

template <class T>
const T& as(const Address& address) {
  return *reinterpret_cast<const T*>(address.raw());
}

Result<uint16_t> parse_port(std::string_view digits, std::string_view text) {
  uint16_t port = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, port);
  if (error != std::errc() || stop != end) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("'{}' in '{}' is not a port: write a number from 0 to 65535", digits, text));
  }
  return port;
}

Result<Address> parse_unix(std::string_view name, std::string_view text) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const bool abstract = name.starts_with('@');
  if (name.size() <= (abstract ? 1 : 0) || (!abstract && name.find('\0') != std::string_view::npos)) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("'{}' names no socket: write unix:/path or unix:@name", text));
  }
  if (name.size() >= sizeof address.sun_path) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("'{}' is too long for a Unix socket: at most {} bytes", text, sizeof address.sun_path - 1));
  }
  if (abstract) return Address::unix_abstract(name.substr(1));
  std::memcpy(address.sun_path, name.data(), name.size());
  const size_t length = offsetof(sockaddr_un, sun_path) + name.size() + 1;  // a path ends with a zero byte
  return Address::from_raw(reinterpret_cast<const sockaddr*>(&address), static_cast<socklen_t>(length));
}

std::optional<Address> parse_numeric(const std::string& host, uint16_t port) {
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(port);
  if (inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) {
    return Address::from_raw(reinterpret_cast<const sockaddr*>(&v4), sizeof v4);
  }
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(port);
  const size_t percent = host.find('%');
  if (percent != std::string::npos) {  // fe80::1%eth0
    v6.sin6_scope_id = if_nametoindex(host.c_str() + percent + 1);
    if (v6.sin6_scope_id == 0) return std::nullopt;
  }
  if (inet_pton(AF_INET6, host.substr(0, percent).c_str(), &v6.sin6_addr) != 1) return std::nullopt;
  return Address::from_raw(reinterpret_cast<const sockaddr*>(&v6), sizeof v6);
}

std::string unix_name(const Address& address) {
  const auto& raw = as<sockaddr_un>(address);
  const size_t length = address.raw_length() - std::min<size_t>(address.raw_length(), offsetof(sockaddr_un, sun_path));
  if (length == 0) return {};  // the unnamed end of a connection
  if (raw.sun_path[0] == '\0') return "@" + std::string(raw.sun_path + 1, length - 1);
  return {raw.sun_path, strnlen(raw.sun_path, length)};
}

std::string v6_name(const sockaddr_in6& raw) {
  char text[INET6_ADDRSTRLEN] = {};
  inet_ntop(AF_INET6, &raw.sin6_addr, text, sizeof text);
  char interface[IF_NAMESIZE];
  if (raw.sin6_scope_id == 0 || if_indextoname(raw.sin6_scope_id, interface) == nullptr) return text;
  return fmt::format("{}%{}", text, interface);
}

}  // namespace

Result<Address> Address::parse(std::string_view text) {
  if (text.starts_with("unix:")) return parse_unix(text.substr(5), text);
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("'{}' has no port: write 10.0.0.1:29500, [::1]:29500, unix:/path or unix:@name", text));
  }
  MUSTER_ASSIGN(const uint16_t port, parse_port(text.substr(colon + 1), text));
  std::string_view host = text.substr(0, colon);
  const bool bracketed = host.size() >= 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  const auto address = parse_numeric(std::string(host), port);
  if (!address || bracketed != (address->family() == AF_INET6)) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("'{}' is not a numeric address: write 10.0.0.1:29500 or [::1]:29500", text));
  }
  return *address;
}

Address Address::from_raw(const sockaddr* address, socklen_t length) {
  Address result;
  result.length_ = std::min<socklen_t>(length, sizeof result.storage_);
  std::memcpy(&result.storage_, address, result.length_);
  return result;
}

Address Address::unix_abstract(std::string_view name) {
  sockaddr_un raw{};
  raw.sun_family = AF_UNIX;
  const size_t size = std::min(name.size(), sizeof raw.sun_path - 1);  // the length marks the end of the name
  std::memcpy(raw.sun_path + 1, name.data(), size);
  return from_raw(reinterpret_cast<const sockaddr*>(&raw),
                  static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size));
}

bool Address::is_loopback() const {
  if (family() == AF_INET) return ntohl(as<sockaddr_in>(*this).sin_addr.s_addr) >> 24 == 127;
  if (family() != AF_INET6) return is_unix();
  const in6_addr& address = as<sockaddr_in6>(*this).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&address) || (IN6_IS_ADDR_V4MAPPED(&address) && address.s6_addr[12] == 127);
}

uint16_t Address::port() const {
  if (family() == AF_INET) return ntohs(as<sockaddr_in>(*this).sin_port);
  if (family() == AF_INET6) return ntohs(as<sockaddr_in6>(*this).sin6_port);
  return 0;
}

Address Address::with_port(uint16_t port) const {
  Address copy = *this;
  if (family() == AF_INET) reinterpret_cast<sockaddr_in&>(copy.storage_).sin_port = htons(port);
  if (family() == AF_INET6) reinterpret_cast<sockaddr_in6&>(copy.storage_).sin6_port = htons(port);
  return copy;
}

std::string Address::host() const {
  if (is_unix()) return unix_name(*this);
  if (family() == AF_INET6) return v6_name(as<sockaddr_in6>(*this));
  if (family() != AF_INET) return {};
  char text[INET_ADDRSTRLEN] = {};
  inet_ntop(AF_INET, &as<sockaddr_in>(*this).sin_addr, text, sizeof text);
  return text;
}

std::string Address::to_string() const {
  if (is_unix()) return "unix:" + host();
  if (family() == AF_INET6) return fmt::format("[{}]:{}", host(), port());
  if (family() == AF_INET) return fmt::format("{}:{}", host(), port());
  return "(no address)";
}

Result<HostPort> parse_host_port(std::string_view text, uint16_t default_port) {
  HostPort result{std::string(text), default_port};
  if (text.starts_with('[')) {
    const size_t close = text.find(']');
    const std::string_view rest = close == std::string_view::npos ? "?" : text.substr(close + 1);
    if (!rest.empty() && rest.front() != ':') {
      return fail(ErrorCode::kInvalidArgument, fmt::format("'{}' is not host:port: write [::1]:29500", text));
    }
    result.host = text.substr(1, close - 1);
    if (!rest.empty()) {
      MUSTER_ASSIGN(result.port, parse_port(rest.substr(1), text));
    }
  } else if (const size_t colon = text.find(':'); colon != std::string_view::npos) {
    if (parse_numeric(result.host, 0)) return result;  // a bare IPv6 address has no room for a port
    result.host = text.substr(0, colon);
    MUSTER_ASSIGN(result.port, parse_port(text.substr(colon + 1), text));
  }
  if (result.host.empty() || result.host.find('\0') != std::string::npos) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("'{}' names no host: write host:port", text));
  }
  return result;
}

}  // namespace muster
