// The functions that ask the system for host names, interfaces and routes.
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
#include "muster/io/outward_address.h"
#include "muster/io/socket.h"

namespace muster {
namespace {

struct Interface {
  std::string name;
  Address address;
  bool up = false;
  bool loopback = false;
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
    interfaces.push_back({entry->ifa_name, Address::from_raw(entry->ifa_addr, length_of(family)),
                          (entry->ifa_flags & IFF_UP) != 0, (entry->ifa_flags & IFF_LOOPBACK) != 0});
  }
  return interfaces;
}

/// Lower is better: IPv4, then an IPv6 address that is valid beyond its link, then a link-local IPv6 address.
constexpr int kLinkLocal = 2;
int preference(const Address& address) {
  if (address.family() == AF_INET) return 0;
  return IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address.raw())->sin6_addr) ? kLinkLocal : 1;
}

/// Asks the kernel whether the address belongs to this host. The kernel also accepts all of 127.0.0.0/8 and wildcards.
bool can_bind(const Address& address) {
  const Fd probe(socket(address.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return probe && bind(probe.get(), address.raw(), address.raw_length()) == 0;
}

std::string describe(const std::vector<Interface>& interfaces) {
  std::string text;
  for (const Interface& each : interfaces) {
    text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", each.name, each.address.host());
  }
  return text.empty() ? "none with an address" : text;
}

}  // namespace

Address outward_address() {
  const std::vector<Interface> interfaces = list_interfaces().value_or(std::vector<Interface>());
  const Interface* best = nullptr;
  for (const Interface& each : interfaces) {
    // A link-local address needs its scope, which the text form of an address does not keep.
    if (!each.up || each.loopback || preference(each.address) == kLinkLocal) continue;
    if (best == nullptr || preference(each.address) < preference(best->address)) best = &each;
  }
  return best != nullptr ? best->address : Address::parse("127.0.0.1:0").value();
}

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
  MUSTER_ASSIGN(const Address local, local_address(probe.get()));
  return local.with_port(0);
}

}  // namespace muster
