#include "muster/launch/cgroup.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <vector>

#include "muster/launch/options/option_values.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kNoMemoryLimit = uint64_t{1} << 60;  // version 1 shows a larger number if there is no limit

bool has_controller(const std::string& list, const std::string& controller) {
  const auto names = split_list(list);
  return std::ranges::find(names, controller) != names.end();
}

// Returns the path of this process's cgroup in the hierarchy of a controller. Lines of the file are
// "4:cpu,cpuacct:/path". The one hierarchy of version 2 has an empty list: "0::/path".
std::string own_cgroup(const std::string& root, const std::string& controller) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string number, controllers, path;
    std::getline(fields, number, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, path);
    if (controllers == controller || has_controller(controllers, controller)) return path;
  }
  return "";
}

// Returns the directories from the root of a mount, which shows the cgroup `top`, down to the cgroup `own`.
std::vector<fs::path> levels_between(const std::string& mount, const std::string& top, const std::string& own) {
  std::vector<fs::path> levels = {mount};
  const fs::path below = fs::path(own).lexically_relative(top);
  if (below.empty() || *below.begin() == "..") return levels;  // a container's mount may hide its own cgroup
  for (const auto& name : below)
    if (name != ".") levels.push_back(levels.back() / name);
  return levels;
}

// Returns the directories that limit this process with a controller. This process's own cgroup is the last one.
std::vector<fs::path> cgroup_levels(const std::string& root, const std::string& controller) {
  std::vector<fs::path> levels;
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {  // "36 35 0:29 TOP MOUNT rw ... - TYPE source OPTIONS"
    std::istringstream words(line);
    std::string word, top, mount, type, source, options;
    words >> word >> word >> word >> top >> mount;
    while (words >> word && word != "-") {
    }
    words >> type >> source >> options;
    // A controller is in one hierarchy only. If it is in one of version 1, that of version 2 lacks it.
    if (type == "cgroup" && has_controller(options, controller))
      return levels_between(root + mount, top, own_cgroup(root, controller));
    if (type == "cgroup2") levels = levels_between(root + mount, top, own_cgroup(root, ""));
  }
  return levels;
}

std::string first_word(const fs::path& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

std::optional<int> cpu_quota(const fs::path& level) {
  std::string quota, period;
  std::ifstream(level / "cpu.max") >> quota >> period;  // "max 100000" without a quota
  if (quota.empty()) {
    quota = first_word(level / "cpu.cfs_quota_us");  // -1 without a quota
    period = first_word(level / "cpu.cfs_period_us");
  }
  const auto time = to_number<int64_t>(quota), per = to_number<int64_t>(period);
  if (!time || !per || *time <= 0 || *per <= 0) return std::nullopt;
  const int64_t cpus = *time / *per + (*time % *per == 0 ? 0 : 1);
  return static_cast<int>(std::min<int64_t>(cpus, std::numeric_limits<int>::max()));
}

// Returns the number in the file of version 2 or of version 1.
std::optional<uint64_t> memory_number(const fs::path& level, const char* v2, const char* v1) {
  const auto number = to_number<uint64_t>(first_word(level / v2));
  return number ? number : to_number<uint64_t>(first_word(level / v1));
}

std::optional<uint64_t> memory_peak(const fs::path& level) {
  return memory_number(level, "memory.peak", "memory.max_usage_in_bytes");
}

uint64_t count_oom_kills(const fs::path& level) {
  for (const char* name : {"memory.events", "memory.oom_control"}) {
    std::ifstream file(level / name);
    for (std::string field, value; file >> field >> value;)
      if (field == "oom_kill") return to_number<uint64_t>(value).value_or(0);
  }
  return 0;
}

}  // namespace

std::optional<int> cgroup_cpus(const std::string& root) {
  std::optional<int> fewest;
  for (const auto& level : cgroup_levels(root, "cpu")) {
    const auto cpus = cpu_quota(level);
    if (cpus && (!fewest || *cpus < *fewest)) fewest = cpus;
  }
  return fewest;
}

CgroupMemory cgroup_memory(const std::string& root) {
  CgroupMemory memory;
  const auto levels = cgroup_levels(root, "memory");
  if (levels.empty()) return memory;
  memory.oom_kills = count_oom_kills(levels.back());
  memory.peak = memory_peak(levels.back());
  for (const auto& level : levels) {
    const auto limit = memory_number(level, "memory.max", "memory.limit_in_bytes");
    if (!limit || *limit >= memory.limit.value_or(kNoMemoryLimit)) continue;
    memory.limit = limit;
    memory.peak = memory_peak(level);
  }
  return memory;
}

}  // namespace muster
