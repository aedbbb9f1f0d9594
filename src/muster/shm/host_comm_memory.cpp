#include "muster/shm/host_comm_memory.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <utility>

#include "muster/base/at_fork.h"
#include "muster/base/check.h"

namespace muster {
namespace {

struct Header {
  uint64_t magic;
  uint64_t slot_bytes;
  uint32_t size;
  uint32_t has_leader;
};

constexpr uint64_t kHostCommMagic = 0x35304d4d4f435355;  // "USCOMM05"
constexpr size_t kHeaderBytes = 128;
constexpr size_t kPage = 4096;
constexpr int kMaxSize = 1 << 16;
static_assert(sizeof(Header) <= kHeaderBytes);

size_t slots_begin(size_t size) { return (kHeaderBytes + size * sizeof(HostCommRank) + kPage - 1) / kPage * kPage; }
size_t total_bytes(size_t size, size_t slot_bytes) { return slots_begin(size) + size * kHostCommSlots * slot_bytes; }

/// Mappings of this process, by the file's identity.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<HostCommMemory>> mapped;
  const AtFork at_fork = hold_over_fork(mutex);
};
Registry& registry() {
  static Registry* const instance = new Registry;  // never destroyed: groups may outlive main's statics
  return *instance;
}

}  // namespace

HostCommShape host_comm_shape(int size, int cores, size_t preferred) {
  constexpr size_t kMaxAllSlots = size_t{64} << 20, kMinSlot = size_t{32} << 10, kMinBytesPerRank = 64;
  const auto ranks = static_cast<size_t>(size);
  const size_t smallest = std::max(kMinSlot, (ranks * kMinBytesPerRank + kPage - 1) / kPage * kPage);
  const size_t share = kMaxAllSlots / (ranks * kHostCommSlots) / kMinSlot * kMinSlot;
  return {.slot_bytes = std::min(preferred, std::max(share, smallest)),
          .has_leader = size > kMaxFlatRanks && size > 2 * cores};
}

Result<Fd> HostCommMemory::allocate(int size, size_t slot_bytes, bool has_leader) {
  MUSTER_CHECK(size > 0 && size <= kMaxSize && slot_bytes > 0 && slot_bytes % kPage == 0,
               "a host communicator needs ranks and whole pages");
  const size_t bytes = total_bytes(size, slot_bytes);
  MUSTER_TRY(check_file_limit(bytes));
  Fd memory(memfd_create("muster-host-comm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory) return fail_errno(errno, "cannot create shared memory");
  const auto begin = static_cast<off_t>(slots_begin(size));
  if (ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0 || fallocate(memory.get(), 0, 0, begin) != 0) {
    return fail_errno(errno, fmt::format("cannot get {} bytes of shared memory", bytes));
  }
  const Header header{kHostCommMagic, slot_bytes, static_cast<uint32_t>(size), has_leader ? 1U : 0U};
  if (pwrite(memory.get(), &header, sizeof(header), 0) != sizeof(header)) {
    return fail_errno(errno, "cannot write to shared memory");
  }
  if (fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return fail_errno(errno, "cannot seal shared memory");
  }
  return memory;
}

Result<std::shared_ptr<HostCommMemory>> HostCommMemory::map(const Fd& memory, int size) {
  const auto info = status_if_sealed(memory);
  Header header{};
  if (!info || pread(memory.get(), &header, sizeof(header), 0) != sizeof(header) || header.magic != kHostCommMagic) {
    return fail(ErrorCode::kProtocol,
                "the shared memory that rank 0 sent is not a host communicator of this version of muster");
  }
  if (header.size != static_cast<uint32_t>(size) || header.slot_bytes == 0 || header.slot_bytes > (1ULL << 32) ||
      header.slot_bytes % kPage != 0 ||
      static_cast<size_t>(info->st_size) != total_bytes(header.size, header.slot_bytes)) {
    return fail(ErrorCode::kMismatch,
                fmt::format("the shared memory was made for {} ranks, not {}", header.size, size));
  }
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  std::erase_if(known.mapped, [](const auto& mapping) { return mapping.second.expired(); });
  auto& entry = known.mapped[{info->st_dev, info->st_ino}];
  if (auto shared = entry.lock()) return shared;
  const auto bytes = static_cast<size_t>(info->st_size);
  MappedMemory mapped = map_memory(memory, bytes);
  if (!mapped) {
    return fail_errno(errno, fmt::format("cannot map {} bytes of shared memory (is there a limit, ulimit -v?)", bytes));
  }
  std::shared_ptr<HostCommMemory> made(
      new HostCommMemory(std::move(mapped), size, header.slot_bytes, header.has_leader != 0));
  entry = made;
  return made;
}

Result<> HostCommMemory::populate(const Fd& memory, Rank rank) const {
  const auto offset = slot(rank, 0) - memory_.get();
  const auto bytes = static_cast<off_t>(kHostCommSlots * slot_bytes_);
  while (fallocate(memory.get(), 0, offset, bytes) != 0) {
    if (errno == EINTR) continue;
    return fail_errno(errno, fmt::format("cannot get {} bytes of shared memory", bytes));
  }
  return {};
}

HostCommMemory::HostCommMemory(MappedMemory memory, int size, size_t slot_bytes, bool has_leader)
    : memory_(std::move(memory)),
      slot_bytes_(slot_bytes),
      has_leader_(has_leader),
      ranks_(reinterpret_cast<HostCommRank*>(memory_.get() + kHeaderBytes)),
      slots_(memory_.get() + slots_begin(size)) {}

}  // namespace muster
