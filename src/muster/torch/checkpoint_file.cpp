#include "muster/torch/checkpoint_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ATen/ATen.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "muster/io/fd.h"

namespace muster::checkpoint {
namespace {

/// Flushes the directory entry: without it, a crash of the machine may lose the new name.
void flush_directory_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path();
  const std::string directory = parent.empty() ? "." : parent;
  const Fd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // EINVAL: this file system cannot flush directories.
  if (!fd || (::fsync(fd.get()) != 0 && errno != EINVAL)) throw_errno(errno, "cannot flush the directory " + directory);
}

}  // namespace

void throw_errno(int number, const std::string& what) { throw std::runtime_error(what + ": " + std::strerror(number)); }

void write_atomically(const std::string& path, const std::function<void(const ByteSink&)>& body) {
  const std::string partial = path + ".partial";
  const Fd fd(::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!fd) throw_errno(errno, "cannot create " + partial);
  int failure = 0;  // kept, not thrown, because an archive's writer continues in its destructor
  const ByteSink sink = [&](const void* data, size_t size) {
    for (size_t done = 0; done < size && failure == 0;) {
      const ssize_t count = ::write(fd.get(), static_cast<const char*>(data) + done, size - done);
      if (count >= 0) {
        done += static_cast<size_t>(count);
      } else if (errno != EINTR) {
        failure = errno;
      }
    }
    return size;
  };
  try {
    body(sink);
  } catch (...) {
    ::unlink(partial.c_str());
    throw;
  }
  if (failure == 0 && ::fsync(fd.get()) != 0) failure = errno;
  if (failure == 0 && ::rename(partial.c_str(), path.c_str()) != 0) failure = errno;
  if (failure != 0) {
    ::unlink(partial.c_str());
    throw_errno(failure, "cannot write " + path);
  }
  flush_directory_of(path);
}

at::Tensor read_file(const std::string& path) {
  // O_NONBLOCK: open() does not wait for the writer of a FIFO.
  const Fd fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) throw_errno(errno, "cannot read " + path);
  const at::Tensor bytes = at::empty({status.st_size}, at::kByte);
  for (size_t done = 0; done < bytes.nbytes();) {
    const ssize_t count = ::read(fd.get(), static_cast<char*>(bytes.mutable_data_ptr()) + done, bytes.nbytes() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_errno(errno, "cannot read " + path);
    if (count == 0) throw std::runtime_error("cannot read " + path + ": the file was truncated while it was read");
    done += static_cast<size_t>(count);
  }
  return bytes;
}

}  // namespace muster::checkpoint
