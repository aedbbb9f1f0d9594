#include "muster/shm/memory_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>

namespace muster {

Result<> check_file_limit(size_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur) return {};
  return fail(ErrorCode::kResourceExhausted,
              fmt::format("{} bytes of shared memory are beyond this process's limit on file sizes, {}; raise it "
                          "(ulimit -f)",
                          bytes, limit.rlim_cur));
}

std::optional<struct stat> status_if_sealed(const Fd& file) {
  struct stat status {};
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(file.get(), &status) != 0) return std::nullopt;
  return status;
}

MappedMemory map_memory(const Fd& file, size_t bytes) {
  void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  return MappedMemory(base == MAP_FAILED ? nullptr : static_cast<uint8_t*>(base), Unmap{bytes});
}

}  // namespace muster
