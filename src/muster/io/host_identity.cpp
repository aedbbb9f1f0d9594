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

/// Without proof that two processes share a kernel, muster assumes that they do not.
std::string unique_domain() {
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
  const std::string boot = boot_id();
  const uint64_t network = namespace_number("/proc/self/ns/net");
  if (boot.empty() || network == 0) return unique_domain();
  return fmt::format("{}/net:{}/uid:{}", boot, network, getuid());
}

std::string process_domain() {
  const std::string boot = boot_id();
  const uint64_t processes = pid_namespace();
  if (boot.empty() || processes == 0) return unique_domain();
  return fmt::format("{}/pid:{}", boot, processes);
}

}  // namespace muster
