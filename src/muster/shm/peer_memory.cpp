#include "muster/shm/peer_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>

#include <cerrno>

namespace muster {

Result<const PeerMemory::Mapping*> PeerMemory::find(pid_t pid, const Arena::Location& location, size_t bytes) {
  if (location.offset > location.segment_bytes || bytes > location.segment_bytes - location.offset) {
    return fail(ErrorCode::kProtocol, "a tensor in shared memory extends beyond its segment");
  }
  for (auto mapping = mappings_.begin(); mapping != mappings_.end(); ++mapping) {
    if (mapping->pid != pid || mapping->segment != location.segment) continue;
    if (mapping->bytes != location.segment_bytes)
      return fail(ErrorCode::kProtocol, "a peer announced two sizes for one segment of tensors");
    mappings_.splice(mappings_.end(), mappings_, mapping);
    return &*mapping;
  }
  MUSTER_ASSIGN(Mapping mapping, open(pid, location));
  if (mappings_.size() == kMaxMappings) mappings_.pop_front();
  mappings_.push_back(std::move(mapping));
  return &mappings_.back();
}

Result<uint8_t*> PeerMemory::map(pid_t pid, const Arena::Location& location, size_t bytes) {
  MUSTER_ASSIGN(const Mapping* const mapping, find(pid, location, bytes));
  return mapping->memory.get() + location.offset;
}

Result<std::shared_ptr<uint8_t>> PeerMemory::share(pid_t pid, const Arena::Location& location, size_t bytes) {
  // The pages of a process that has died live for as long as a mapping does.
  std::erase_if(mappings_, [](const Mapping& mapping) {
    return mapping.memory.use_count() == 1 && ::kill(mapping.pid, 0) != 0 && errno == ESRCH;
  });
  MUSTER_ASSIGN(const Mapping* const mapping, find(pid, location, bytes));
  return std::shared_ptr<uint8_t>(mapping->memory, mapping->memory.get() + location.offset);
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
  const auto status = status_if_sealed(file);
  if (!status || status->st_ino != location.segment ||
      static_cast<uint64_t>(status->st_size) != location.segment_bytes) {
    return fail(ErrorCode::kProtocol, fmt::format("{} is not the segment of tensors that the peer announced", path));
  }
  MappedMemory memory = map_memory(file, location.segment_bytes);
  if (!memory) {
    return fail_errno(errno, fmt::format("cannot map {} bytes of a peer's tensors", location.segment_bytes));
  }
  (void)madvise(memory.get(), location.segment_bytes, MADV_HUGEPAGE);
  return Mapping{pid, location.segment, location.segment_bytes, std::move(memory)};
}

}  // namespace muster
