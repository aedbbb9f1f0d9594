#include "muster/launch/locked_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

namespace muster {

Fd make_locked_file(const std::string& path) {
  const std::filesystem::path name(path);
  const std::string early = name.parent_path() / ("new " + name.filename().string());
  ::unlink(early.c_str());  // of one that was killed here
  Fd file(::open(early.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  const bool made = file && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0 && ::rename(early.c_str(), path.c_str()) == 0;
  return made ? std::move(file) : Fd();
}

bool remove_abandoned_file(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!file || ::flock(file.get(), LOCK_SH | LOCK_NB) != 0) return false;
  struct stat opened {}, there {};
  const bool same = ::fstat(file.get(), &opened) == 0 && ::lstat(path.c_str(), &there) == 0 &&
                    opened.st_dev == there.st_dev && opened.st_ino == there.st_ino;
  return same && ::unlink(path.c_str()) == 0;  // or it was just replaced by that of another who lives
}

}  // namespace muster
