#include "muster/shm/host_comm_memory.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
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
  uint64_t size;
};

constexpr uint64_t kHostCommMagic = 0x36304d4d4f435355;  // "USCOMM06"
constexpr size_t kStateOffset = 64;
constexpr size_t kHeaderBytes = 128;  // with HostCommState
constexpr size_t kPage = 4096;
constexpr int kMaxSize = 1 << 16;
static_assert(sizeof(Header) <= kStateOffset && kStateOffset + sizeof(HostCommState) <= kHeaderBytes);

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

Result<Fd> HostCommMemory::allocate(int size, size_t slot_bytes) {
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
  const Header header{kHostCommMagic, slot_bytes, static_cast<uint64_t>(size)};
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
  if (header.size != static_cast<uint64_t>(size) || header.slot_bytes == 0 || header.slot_bytes > (1ULL << 32) ||
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
  std::shared_ptr<HostCommMemory> made(new HostCommMemory(std::move(mapped), size, header.slot_bytes));
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

/// If the cores of a rank are not known, because the kernel does not tell them, all ranks count as sharing one core.
void HostCommMemory::join() {
  const uint32_t joined = state_->joined.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (joined == static_cast<uint32_t>(size_)) set_leader(host_comm_shape(size_, count_cores()).has_leader);
}

int HostCommMemory::count_cores() const {
  std::array<uint64_t, kCoreWords> together{};
  for (Rank rank = 0; rank < size_; ++rank) {
    uint64_t any = 0;
    for (size_t i = 0; i < together.size(); ++i) {
      const uint64_t word = ranks_[rank].usable_cores[i].load(std::memory_order_relaxed);
      together[i] |= word;
      any |= word;
    }
    if (any == 0) return 0;
  }
  int cores = 0;
  for (const uint64_t word : together) cores += std::popcount(word);
  return cores;
}

HostCommMemory::HostCommMemory(MappedMemory memory, int size, size_t slot_bytes)
    : memory_(std::move(memory)),
      size_(size),
      slot_bytes_(slot_bytes),
      state_(reinterpret_cast<HostCommState*>(memory_.get() + kStateOffset)),
      ranks_(reinterpret_cast<HostCommRank*>(memory_.get() + kHeaderBytes)),
      slots_(memory_.get() + slots_begin(size)) {}

}  // namespace muster
