#include "server_process.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <memory>
#include <string>

namespace muster::load {

double ServerProcess::cpu_seconds() const {
  clockid_t clock{};
  timespec spent{};
  if (clock_getcpuclockid(pid_, &clock) != 0 || clock_gettime(clock, &spent) != 0) return 0;
  return static_cast<double>(spent.tv_sec) + 1e-9 * static_cast<double>(spent.tv_nsec);
}

size_t ServerProcess::resident_bytes() const {
  std::ifstream file("/proc/" + std::to_string(pid_) + "/statm");
  size_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

size_t ServerProcess::descriptors() const {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(("/proc/" + std::to_string(pid_) + "/fd").c_str()),
                                                   closedir);
  size_t count = 0;
  while (folder && readdir(folder.get()) != nullptr) ++count;
  return count;
}

void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlimit more{1 << 18, std::max<rlim_t>(limit.rlim_max, 1 << 18)};  // root may
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &more) != 0) setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace muster::load
