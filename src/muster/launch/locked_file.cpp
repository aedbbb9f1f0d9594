#include "muster/launch/locked_file.h"

#include <fcntl.h>
#include <sys/file.h>
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

}  // namespace muster
