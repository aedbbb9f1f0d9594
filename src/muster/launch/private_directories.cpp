#include "muster/launch/private_directories.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "muster/io/host_identity.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxName = 32;  // bytes in the name of a socket's file
constexpr const char* kName = "muster-XXXXXX";

// The name contains the boot id of this kernel, because other hosts that share the file system may not see the lock.
std::string lock_name() { return "lock-" + boot_id(); }

bool looks_like_ours(const fs::path& path) {
  struct stat found {};
  const std::string name = path.filename(), pattern = kName;
  return name.size() == pattern.size() && name.starts_with(pattern.substr(0, pattern.find('X'))) &&
         ::lstat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode) && found.st_uid == ::geteuid();
}

// Skips a directory without the lock file: it is being created, or it is not one of muster's.
void remove_abandoned(const fs::path& parent) {
  std::error_code ignored;
  for (fs::directory_iterator it(parent, ignored), end; it != end; it.increment(ignored)) {
    if (!looks_like_ours(it->path())) continue;
    const Fd lock(::open((it->path() / lock_name()).c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
    if (lock && ::flock(lock.get(), LOCK_EX | LOCK_NB) == 0) fs::remove_all(it->path(), ignored);
  }
}

// True if `path` is still the file or directory that was opened.
bool is_at(const std::string& path, const Fd& file) {
  struct stat opened {
  }, current{};
  return ::fstat(file.get(), &opened) == 0 && ::lstat(path.c_str(), &current) == 0 && opened.st_dev == current.st_dev &&
         opened.st_ino == current.st_ino;
}

}  // namespace

Fd make_locked_file(const std::string& path) {
  const fs::path name(path);
  const std::string temporary = name.parent_path() / ("new " + name.filename().string());
  ::unlink(temporary.c_str());  // left by a process that was killed before the rename
  Fd file(::open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  const bool made =
      file && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0 && ::rename(temporary.c_str(), path.c_str()) == 0;
  return made ? std::move(file) : Fd();
}

bool remove_abandoned_file(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!file || ::flock(file.get(), LOCK_SH | LOCK_NB) != 0) return false;
  return is_at(path, file) && ::unlink(path.c_str()) == 0;  // otherwise another process has just replaced the file
}

Result<std::string> user_directory(const Environment& environment, bool create) {
  const std::string runtime = value_of(environment, "XDG_RUNTIME_DIR");
  constexpr size_t kMaxSeconds = sizeof(sockaddr_un::sun_path) - std::string_view("/muster/").size() - kMaxName - 1;
  const bool has_runtime = runtime.size() <= kMaxSeconds && ::access(runtime.c_str(), W_OK) == 0;
  std::string directory = has_runtime ? runtime + "/muster" : "/tmp/muster-" + std::to_string(::geteuid());
  if (create && ::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST)
    return fail_errno(errno, "cannot create " + directory + " (set XDG_RUNTIME_DIR to another directory)");
  struct stat info {};
  if (::lstat(directory.c_str(), &info) != 0) {
    if (errno == ENOENT) return directory;  // not made, or removed since
    return fail_errno(errno, "cannot inspect " + directory);
  }
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 077) != 0)
    return fail(
        ErrorCode::kUnavailable,
        directory + " is not a private directory of this user: remove it, or set XDG_RUNTIME_DIR to another directory");
  return directory;
}

Result<Fd> lock_user_directory(const Environment& environment) {
  while (true) {
    MUSTER_ASSIGN(const std::string directory, user_directory(environment));
    Fd lock(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!lock && errno == ENOENT) continue;  // removed since
    if (!lock || ::flock(lock.get(), LOCK_EX) != 0) return fail_errno(errno, "cannot lock " + directory);
    if (is_at(directory, lock)) return lock;
  }
}

void remove_user_directory(const std::string& directory) {
  const Fd lock(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  // Several processes may remove it at the same time, so that the last one does.
  if (lock && ::flock(lock.get(), LOCK_SH | LOCK_NB) == 0) ::rmdir(directory.c_str());
}

Result<Address> socket_at(const std::string& path) { return Address::parse("unix:" + path); }

std::string temporary_directory() {
  std::error_code error;
  const fs::path directory = fs::absolute(fs::temp_directory_path(error), error);
  return error || directory.empty() ? "/tmp" : directory.string();
}

ScratchDirectory::ScratchDirectory() {
  const fs::path parent = temporary_directory();
  remove_abandoned(parent);
  std::string pattern = parent / kName;
  if (::mkdtemp(pattern.data()) == nullptr) return;
  path_ = pattern;
  lock_ =
      make_locked_file(path_ + "/" + lock_name());  // without a lock the directory stays if both processes are killed
}

void ScratchDirectory::remove() const {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

}  // namespace muster
