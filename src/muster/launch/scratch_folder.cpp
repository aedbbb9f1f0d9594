#include "muster/launch/scratch_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "muster/io/host_identity.h"
#include "muster/launch/locked_file.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

constexpr const char* kName = "muster-XXXXXX";

// Of this kernel: other hosts that share the file system may not see that a lock is held.
std::string lock_name() { return "lock-" + boot_id(); }

bool looks_like_ours(const fs::path& path) {
  struct stat found {};
  const std::string name = path.filename(), pattern = kName;
  return name.size() == pattern.size() && name.starts_with(pattern.substr(0, pattern.find('X'))) &&
         ::lstat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode) && found.st_uid == ::geteuid();
}

// One without a lock is being made, or is nothing of this kind.
void remove_abandoned(const fs::path& parent) {
  std::error_code ignored;
  for (fs::directory_iterator it(parent, ignored), end; it != end; it.increment(ignored)) {
    if (!looks_like_ours(it->path())) continue;
    const Fd lock(::open((it->path() / lock_name()).c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
    if (lock && ::flock(lock.get(), LOCK_EX | LOCK_NB) == 0) fs::remove_all(it->path(), ignored);
  }
}

}  // namespace

std::string temporary_folder() {
  std::error_code error;
  const fs::path folder = fs::absolute(fs::temp_directory_path(error), error);
  return error || folder.empty() ? "/tmp" : folder.string();
}

ScratchFolder::ScratchFolder() {
  const fs::path parent = temporary_folder();
  remove_abandoned(parent);
  std::string pattern = parent / kName;
  if (::mkdtemp(pattern.data()) == nullptr) return;
  path_ = pattern;
  lock_ = make_locked_file(path_ + "/" + lock_name());  // without one it just stays should all be killed
}

void ScratchFolder::remove() const {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

}  // namespace muster
