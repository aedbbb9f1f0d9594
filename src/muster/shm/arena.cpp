#include "muster/shm/arena.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>

#include "muster/base/check.h"
#include "muster/shm/memory_file.h"

namespace muster {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;
/// The minimum size of a segment. It is address space only; memory is allocated with the blocks.
constexpr size_t kSegmentBytes = size_t{64} << 20;
/// Empty segments are kept up to this total size, so that the tensors of the next step reuse them.
constexpr size_t kKeptBytes = size_t{256} << 20;

size_t round_up(size_t bytes, size_t grain) { return (bytes + grain - 1) / grain * grain; }

size_t half_of_memory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE)) / 2;
}

tl::unexpected<Error> exhausted(const std::string& what, size_t bytes) {
  return fail(ErrorCode::kResourceExhausted,
              fmt::format("cannot get {} bytes of shared memory for a tensor: {}", bytes, what));
}

}  // namespace

struct Arena::Segment {
  Fd file;
  uint64_t inode = 0;
  MappedMemory memory;
  size_t bytes = 0;
  size_t populated = 0;            ///< pages below this are allocated
  bool inherited = false;          ///< from before a fork: only the parent allocates from it
  std::map<size_t, size_t> free;   ///< offset, bytes; adjacent ranges are merged
  std::map<size_t, size_t> taken;  ///< offset, bytes

  ~Segment() {
    memory.reset();
    // Frees the pages even if peers still have the segment mapped.
    if (!inherited)
      (void)fallocate(file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(bytes));
  }

  /// Allocates the pages of [0, end), so that access cannot raise SIGBUS.
  bool populate(size_t end) {
    end = std::min(round_up(end, kHugePage), bytes);
    while (populated < end) {
      if (fallocate(file.get(), 0, static_cast<off_t>(populated), static_cast<off_t>(end - populated)) == 0) {
        populated = end;
      } else if (errno != EINTR) {
        return false;
      }
    }
    return true;
  }

  /// Returns the bytes of the block.
  size_t give_back(size_t offset) {
    const auto block = taken.find(offset);
    MUSTER_CHECK(block != taken.end(), "memory is freed twice, or does not belong to the arena");
    const size_t freed = block->second;
    auto next = free.emplace(offset, freed).first;
    taken.erase(block);
    if (const auto after = std::next(next); after != free.end() && next->first + next->second == after->first) {
      next->second += after->second;
      free.erase(after);
    }
    if (next == free.begin()) return freed;
    if (const auto before = std::prev(next); before->first + before->second == next->first) {
      before->second += next->second;
      free.erase(next);
    }
    return freed;
  }
};

std::shared_ptr<Arena> Arena::create(size_t limit) {
  return std::shared_ptr<Arena>(new Arena(limit != 0 ? limit : half_of_memory()));
}

Arena::Arena(size_t limit)
    : limit_(limit),
      at_fork_(AtFork::Callbacks{.before = [this] { mutex_.lock(); },
                                 .in_parent = [this] { mutex_.unlock(); },
                                 .in_child = [this] { begin_in_child(); }}) {}

Result<void*> Arena::allocate(size_t bytes) {
  if (bytes > limit_) return exhausted(fmt::format("the limit is {}", limit_), bytes);
  const size_t wanted = round_up(std::max<size_t>(bytes, 1), kAlignment);
  const std::lock_guard lock(mutex_);
  if (used_ + wanted > limit_) return exhausted(fmt::format("{} of {} bytes are in use", used_, limit_), bytes);
  for (auto& [address, segment] : segments_) {
    if (void* const data = take(*segment, wanted)) return data;
  }
  MUSTER_ASSIGN(Segment* const fresh, grow(wanted));
  if (void* const data = take(*fresh, wanted)) return data;
  const std::string why = std::strerror(errno);
  segments_.erase(reinterpret_cast<uintptr_t>(fresh->memory.get()));
  return exhausted(why + "; free some, or use ordinary tensors", bytes);
}

/// A block from the first free range that is large enough; null if there is none, or no memory.
void* Arena::take(Segment& segment, size_t bytes) {
  if (segment.inherited) return nullptr;
  for (auto range = segment.free.begin(); range != segment.free.end(); ++range) {
    const auto [offset, length] = *range;
    if (length < bytes) continue;
    if (!segment.populate(offset + bytes)) return nullptr;
    segment.free.erase(range);
    if (length > bytes) segment.free.emplace(offset + bytes, length - bytes);
    segment.taken.emplace(offset, bytes);
    used_ += bytes;
    blocks_.fetch_add(1, std::memory_order_relaxed);
    return segment.memory.get() + offset;
  }
  return nullptr;
}

Result<Arena::Segment*> Arena::grow(size_t bytes) {
  const size_t size = round_up(std::max(bytes, kSegmentBytes), kHugePage);
  if (!check_file_limit(size)) return exhausted("the limit on file sizes is lower (ulimit -f)", bytes);
  auto segment = std::make_unique<Segment>();
  segment->file.reset(memfd_create("muster-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const int file = segment->file.get();
  struct stat status {};
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0 ||
      fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0 || fstat(file, &status) != 0) {
    return fail_errno(errno, "cannot create shared memory for tensors");
  }
  segment->memory = map_memory(segment->file, size);
  if (!segment->memory) return fail_errno(errno, fmt::format("cannot map {} bytes of shared memory", size));
  (void)madvise(segment->memory.get(), size, MADV_HUGEPAGE);  // only a hint
  segment->inode = status.st_ino;
  segment->bytes = size;
  segment->free.emplace(0, size);
  Segment* const made = segment.get();
  segments_.emplace(reinterpret_cast<uintptr_t>(made->memory.get()), std::move(segment));
  return made;
}

void Arena::free(void* data) {
  if (data == nullptr) return;
  const std::lock_guard lock(mutex_);
  auto found = segments_.upper_bound(reinterpret_cast<uintptr_t>(data));
  MUSTER_CHECK(found != segments_.begin(), "memory that is freed does not belong to the arena");
  Segment& segment = *(--found)->second;
  used_ -= segment.give_back(static_cast<uint8_t*>(data) - segment.memory.get());
  blocks_.fetch_sub(1, std::memory_order_relaxed);
  if (!segment.taken.empty()) return;
  size_t kept = 0;
  for (const auto& [address, each] : segments_) kept += each->taken.empty() ? each->bytes : 0;
  if (kept > kKeptBytes || segment.inherited) segments_.erase(found);
}

std::optional<Arena::Location> Arena::find(const void* data, size_t bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const std::shared_lock lock(mutex_);
  auto found = segments_.upper_bound(address);
  if (found == segments_.begin()) return std::nullopt;
  const Segment& segment = *(--found)->second;
  const size_t offset = address - found->first;
  if (segment.inherited || offset >= segment.bytes || bytes > segment.bytes - offset) return std::nullopt;
  return Location{segment.inode, segment.bytes, offset, segment.file.get()};
}

size_t Arena::mapped_bytes() const {
  const std::shared_lock lock(mutex_);
  size_t all = 0;
  for (const auto& [address, segment] : segments_) all += segment->bytes;
  return all;
}

/// The child must not allocate from inherited segments, because the parent may use blocks that are free here. The lock
/// is constructed again, because it may count waiting threads that the child does not have.
void Arena::begin_in_child() {
  std::construct_at(&mutex_);
  for (auto& [address, segment] : segments_) segment->inherited = true;
}

}  // namespace muster
