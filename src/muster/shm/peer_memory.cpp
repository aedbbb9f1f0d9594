#include "muster/shm/peer_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

namespace muster {
PeerMemory::~PeerMemory() {
  for (const Mapping& mapping : mappings_) munmap(mapping.base, mapping.bytes);
}

Result<uint8_t*> PeerMemory::map(pid_t pid, const Arena::Location& location, size_t bytes) {
  if (location.offset > location.segment_bytes || bytes > location.segment_bytes - location.offset) {
    return fail(ErrorCode::kProtocol, "a tensor in shared memory extends beyond its segment");
  }
  for (auto mapping = mappings_.begin(); mapping != mappings_.end(); ++mapping) {
    if (mapping->pid != pid || mapping->segment != location.segment) continue;
    if (mapping->bytes != location.segment_bytes)
      return fail(ErrorCode::kProtocol, "a peer announced two sizes for one segment of tensors");
    mappings_.splice(mappings_.end(), mappings_, mapping);
    return mapping->base + location.offset;
  }
  MUSTER_ASSIGN(const Mapping mapping, open(pid, location));
  if (mappings_.size() == kMaxMappings) {
    munmap(mappings_.front().base, mappings_.front().bytes);
    mappings_.pop_front();
  }
  mappings_.push_back(mapping);
  return mapping.base + location.offset;
}

void PeerMemory::add_known(uint64_t segment) {
  if (!known_.insert(segment).second) return;
  known_order_.push_back(segment);
  if (known_order_.size() <= kMaxMappings) return;
  known_.erase(known_order_.front());
  known_order_.pop_front();
}

Result<PeerMemory::Mapping> PeerMemory::open(pid_t pid, const Arena::Location& location) {
  const std::string path = fmt::format("/proc/{}/fd/{}", pid, location.fd);
  const Fd file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (!file) {
    return fail(
        ErrorCode::kUnavailable,
        fmt::format("cannot open {}, errno {}: this system does not let processes of one user see each other's files",
                    path, errno));
  }
  struct stat status {};
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (fstat(file.get(), &status) != 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0 ||
      status.st_ino != location.segment || static_cast<uint64_t>(status.st_size) != location.segment_bytes) {
    return fail(ErrorCode::kProtocol, fmt::format("{} is not the segment of tensors that the peer announced", path));
  }
  void* const base = mmap(nullptr, location.segment_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (base == MAP_FAILED) {
    return fail_errno(errno, fmt::format("cannot map {} bytes of a peer's tensors", location.segment_bytes));
  }
  (void)madvise(base, location.segment_bytes, MADV_HUGEPAGE);
  return Mapping{pid, location.segment, static_cast<uint8_t*>(base), location.segment_bytes};
}

}  // namespace muster
