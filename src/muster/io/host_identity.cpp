#include "muster/io/host_identity.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>

#include "muster/base/bytes.h"
#include "muster/base/random.h"

namespace muster {
namespace {

/// A namespace's number, from its file in /proc; 0: unknown.
uint64_t namespace_number(const char* file) {
  struct stat found {};
  return stat(file, &found) == 0 ? found.st_ino : 0;
}

/// The boot id and `rest`, if the namespace's number is known. Without proof that two processes share a kernel, muster
/// assumes that they do not.
std::string domain(uint64_t number, const std::string& rest) {
  const std::string boot = boot_id();
  if (!boot.empty() && number != 0) return boot + "/" + rest;
  std::array<uint8_t, 16> word;
  fill_secure_random(word);
  return "unknown-" + to_hex(word);
}

}  // namespace

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

uint64_t pid_namespace() { return namespace_number("/proc/self/ns/pid"); }

std::string shared_memory_domain() {
  const uint64_t network = namespace_number("/proc/self/ns/net");
  return domain(network, fmt::format("net:{}/uid:{}", network, getuid()));
}

std::string process_domain() {
  const uint64_t processes = pid_namespace();
  return domain(processes, fmt::format("pid:{}", processes));
}

}  // namespace muster
