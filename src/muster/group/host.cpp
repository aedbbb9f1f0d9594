#include "muster/group/host.h"

#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <memory>

namespace muster {

std::string shared_memory_domain() {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  struct stat network {};
  if (boot_id.empty() || stat("/proc/self/ns/net", &network) != 0) {
    // Without proof that two processes share a kernel they are taken for strangers: unique to this process.
    return fmt::format("unknown-{}-{}", host_name(), getpid());
  }
  return fmt::format("{}/net:{}/uid:{}", boot_id, network.st_ino, getuid());
}

uint64_t process_domain() {
  struct stat processes {};
  return stat("/proc/self/ns/pid", &processes) == 0 ? processes.st_ino : 0;
}

Address outward_address() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) list = nullptr;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family) continue;
      if (!(entry->ifa_flags & IFF_UP) || (entry->ifa_flags & IFF_LOOPBACK)) continue;
      // A link-local address means nothing without its scope, which would not survive the text form.
      if (family == AF_INET6 &&
          IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr)->sin6_addr)) {
        continue;
      }
      return Address::from_raw(entry->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    }
  }
  sockaddr_in loopback{};
  loopback.sin_family = AF_INET;
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return Address::from_raw(reinterpret_cast<const sockaddr*>(&loopback), sizeof(loopback));
}

}  // namespace muster
