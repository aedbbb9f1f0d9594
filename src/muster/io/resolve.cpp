// Questions that Address asks the system: names, interfaces, routes.
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>

#include "muster/io/address.h"
#include "muster/io/fd.h"

namespace muster {
namespace {

struct Interface {
  std::string name;
  Address address;
};

socklen_t length_of(int family) { return family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6); }

Result<std::vector<Interface>> list_interfaces() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return fail_errno(errno, "cannot list this host's network interfaces");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(first, &freeifaddrs);
  std::vector<Interface> interfaces;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    interfaces.push_back({entry->ifa_name, Address::from_raw(entry->ifa_addr, length_of(family))});
  }
  return interfaces;
}

/// IPv4 first, then an IPv6 address that is valid beyond its link, then one that is not.
int preference(const Address& address) {
  if (address.family() == AF_INET) return 0;
  return IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address.raw())->sin6_addr) ? 2 : 1;
}

/// The kernel is asked whether the address is ours: it knows about all of 127.0.0.0/8 and about wildcards.
bool can_bind(const Address& address) {
  const Fd probe(socket(address.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return probe && bind(probe.get(), address.raw(), address.raw_length()) == 0;
}

std::string describe(const std::vector<Interface>& interfaces) {
  std::string text;
  for (const auto& [name, address] : interfaces) {
    text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", name, address.host());
  }
  return text.empty() ? "none with an address" : text;
}

}  // namespace

Result<std::vector<Address>> resolve(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* first = nullptr;
  if (const int error = getaddrinfo(host.c_str(), nullptr, &hints, &first); error != 0) {
    return fail(
        ErrorCode::kUnavailable,
        fmt::format("host '{}' is unknown: {}; check its spelling, or give its address", host, gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(first, &freeaddrinfo);
  std::vector<Address> addresses;
  for (const addrinfo* entry = first; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family != AF_INET && entry->ai_family != AF_INET6) continue;
    addresses.push_back(Address::from_raw(entry->ai_addr, entry->ai_addrlen).with_port(port));
  }
  if (addresses.empty()) return fail(ErrorCode::kUnavailable, fmt::format("host '{}' has no IP address", host));
  return addresses;
}

Result<Address> interface_address(const std::string& interface) {
  const bool v6 = interface.find(':') != std::string::npos;
  const auto numeric = Address::parse(v6 ? fmt::format("[{}]:0", interface) : interface + ":0");
  if (numeric && can_bind(*numeric)) return *numeric;
  MUSTER_ASSIGN(const auto interfaces, list_interfaces());
  const Interface* best = nullptr;
  for (const auto& candidate : interfaces) {
    if (candidate.name != interface) continue;
    if (best == nullptr || preference(candidate.address) < preference(best->address)) best = &candidate;
  }
  if (best != nullptr) return best->address;
  const char* problem = numeric                                  ? "is not an address of this host"
                        : if_nametoindex(interface.c_str()) != 0 ? "is an interface without an IP address"
                                                                 : "is not an interface of this host";
  return fail(ErrorCode::kInvalidArgument, fmt::format("'{}' {}; it has {}", interface, problem, describe(interfaces)));
}

Result<Address> local_address_towards(const Address& target) {
  if (target.is_unix()) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{} is not reached from an IP address", target.to_string()));
  }
  const Fd probe(socket(target.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!probe) return fail_errno(errno, "cannot open a socket");
  const Address remote = target.port() == 0 ? target.with_port(9) : target;  // any port shows the route
  if (connect(probe.get(), remote.raw(), remote.raw_length()) != 0) {
    return fail_errno(errno, fmt::format("no route to {}", target.host()));
  }
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (getsockname(probe.get(), reinterpret_cast<sockaddr*>(&storage), &length) != 0) {
    return fail_errno(errno, "cannot ask for a socket's address");
  }
  return Address::from_raw(reinterpret_cast<const sockaddr*>(&storage), length).with_port(0);
}

}  // namespace muster
