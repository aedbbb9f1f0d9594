#include "muster/transport/shm/team.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <new>

#include "muster/base/check.h"
#include "muster/transport/shm/futex.h"

namespace muster {

// The memory: one Header, then a Line per rank, then two Slots per rank (rank-major), each `slot_bytes` long behind its
// tag. All parts start on cache-line bounds; two lines a rank, as processors fetch lines in pairs.
struct Team::Header {
  uint64_t magic;
  uint64_t slot_bytes;
  uint32_t size;
};

struct alignas(128) Team::Line {
  std::atomic<uint32_t> published;  ///< the last step that this rank has published; wraps
  std::atomic<uint32_t> waiters;    ///< ranks parked on `published`
};

struct alignas(64) Team::Slot {
  Tag tag;
  alignas(64) uint8_t data[];
};

namespace {

constexpr uint64_t kMagic = 0x31304d4145545355;  // "USTEAM01"
constexpr size_t kHeaderBytes = 128;
constexpr size_t kSlotHeaderBytes = 64;
constexpr int kSlots = 2;
constexpr int kMaxSize = 1 << 16;
/// While parked, the watch is asked this often: how late the death of a peer is noticed.
constexpr Duration kWatchSlice = std::chrono::milliseconds(2);
/// Turns of a spin before parking, some 50 us at most. A spin in vain halves the next, so that ranks which must share
/// their cores with others soon stop burning them; a good one doubles it.
constexpr int kMostSpins = 3000;
constexpr int kLeastSpins = 32;

/// Steps wrap around; one is never 2^31 ahead of another.
bool at_least(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

Result<Fd> Team::allocate(int size, size_t slot_bytes) {
  MUSTER_CHECK(size > 0 && size <= kMaxSize && slot_bytes % 64 == 0, "a team needs ranks and whole cache lines");
  Fd memory(memfd_create("muster-team", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory) return fail_errno(errno, "cannot create shared memory");
  const size_t bytes =
      kHeaderBytes + static_cast<size_t>(size) * (sizeof(Line) + kSlots * (kSlotHeaderBytes + slot_bytes));
  if (ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0) {
    return fail_errno(errno, fmt::format("cannot get {} bytes of shared memory", bytes));
  }
  const Header header{kMagic, slot_bytes, static_cast<uint32_t>(size)};
  if (pwrite(memory.get(), &header, sizeof(header), 0) != sizeof(header)) {
    return fail_errno(errno, "cannot write to shared memory");
  }
  if (fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return fail_errno(errno, "cannot seal shared memory");
  }
  return memory;
}

Result<std::unique_ptr<Team>> Team::attach(const Fd& memory, Rank rank, int size, Watch watch) {
  MUSTER_CHECK(rank >= 0 && rank < size, "a rank lies within its team");
  const int seals = fcntl(memory.get(), F_GET_SEALS);
  struct stat info {};
  Header header{};
  if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(memory.get(), &info) != 0 ||
      pread(memory.get(), &header, sizeof(header), 0) != sizeof(header) || header.magic != kMagic) {
    return fail(ErrorCode::kProtocol, "the shared memory that came from the leader is not a muster team");
  }
  const size_t slot = kSlotHeaderBytes + header.slot_bytes;
  const size_t bytes = kHeaderBytes + header.size * (sizeof(Line) + kSlots * slot);
  if (header.size != static_cast<uint32_t>(size) || header.slot_bytes > (1ULL << 32) || header.slot_bytes % 64 != 0 ||
      static_cast<size_t>(info.st_size) != bytes) {
    return fail(ErrorCode::kMismatch,
                fmt::format("the shared memory was made for {} ranks, not {}", header.size, size));
  }
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (mapped == MAP_FAILED) return fail_errno(errno, fmt::format("cannot map {} bytes of shared memory", bytes));
  return std::unique_ptr<Team>(new Team(mapped, bytes, rank, size, header.slot_bytes, std::move(watch)));
}

Team::Team(void* memory, size_t bytes, Rank rank, int size, size_t slot_bytes, Watch watch)
    : memory_(memory),
      bytes_(bytes),
      rank_(rank),
      size_(size),
      slot_bytes_(slot_bytes),
      watch_(std::move(watch)),
      // Spinning only pays while every rank has a core to spin on.
      most_spins_(size <= usable_cores() ? kMostSpins : kLeastSpins),
      spins_(most_spins_),
      seen_(static_cast<size_t>(size), 0) {}

Team::~Team() { munmap(memory_, bytes_); }

Team::Line& Team::line(Rank peer) const {
  return *reinterpret_cast<Line*>(static_cast<uint8_t*>(memory_) + kHeaderBytes + sizeof(Line) * peer);
}

Team::Slot& Team::slot_of(Rank peer) const {
  const size_t index = static_cast<size_t>(peer) * kSlots + step_ % kSlots;
  return *reinterpret_cast<Slot*>(static_cast<uint8_t*>(memory_) + kHeaderBytes + sizeof(Line) * size_ +
                                  index * (kSlotHeaderBytes + slot_bytes_));
}

uint8_t* Team::slot(Rank peer) { return slot_of(peer).data; }

const Team::Tag& Team::tag(Rank peer) const { return slot_of(peer).tag; }

Result<> Team::begin(const Deadline& deadline) {
  ++step_;
  // The slot was last read in step_ - kSlots; who has published a later step has done with it.
  const uint32_t released = step_ - kSlots + 1;
  for (Rank peer = 0; peer < size_; ++peer) {
    if (peer != rank_) MUSTER_TRY(wait_for(peer, released, deadline));
  }
  return {};
}

void Team::publish(const Tag& tag) {
  slot_of(rank_).tag = tag;
  Line& own = line(rank_);
  // Sequentially consistent with the waiter's increment and re-read: one of the two sees the other.
  own.published.store(step_, std::memory_order_seq_cst);
  if (own.waiters.load(std::memory_order_seq_cst) != 0) futex_wake_all(own.published);
}

Result<> Team::wait(Rank peer, const Deadline& deadline) { return wait_for(peer, step_, deadline); }

Result<> Team::wait_all(const Deadline& deadline) {
  for (Rank peer = 0; peer < size_; ++peer) {
    if (peer != rank_) MUSTER_TRY(wait_for(peer, step_, deadline));
  }
  return {};
}

bool Team::reached(Rank peer, uint32_t step) {
  if (at_least(seen_[peer], step)) return true;
  seen_[peer] = line(peer).published.load(std::memory_order_acquire);
  return at_least(seen_[peer], step);
}

Result<> Team::wait_for(Rank peer, uint32_t step, const Deadline& deadline) {
  if (reached(peer, step)) return {};
  for (int i = 0; i < spins_; ++i) {
    spin_pause();
    if (!reached(peer, step)) continue;
    spins_ = std::min(most_spins_, 2 * spins_);
    return {};
  }
  spins_ = std::max(kLeastSpins, spins_ / 2);
  return park(peer, step, deadline);
}

Result<> Team::park(Rank peer, uint32_t step, const Deadline& deadline) {
  Line& awaited = line(peer);
  for (;;) {
    awaited.waiters.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t value = awaited.published.load(std::memory_order_seq_cst);
    if (!at_least(value, step)) futex_wait(awaited.published, value, std::min(kWatchSlice, deadline.left()));
    awaited.waiters.fetch_sub(1, std::memory_order_relaxed);
    if (reached(peer, step)) return {};
    auto watched = watch_(peer);
    if (reached(peer, step)) return {};
    if (!watched) return watched;
    if (deadline.passed()) return late(peer, step);
  }
}

tl::unexpected<Error> Team::late(Rank awaited, uint32_t step) const {
  std::string others;
  for (Rank peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || peer == awaited || at_least(line(peer).published.load(std::memory_order_acquire), step)) {
      continue;
    }
    others += fmt::format("{}{}", others.empty() ? "" : ", ", peer);
  }
  return fail(ErrorCode::kTimeout,
              fmt::format("rank {} has not arrived in time{}", awaited,
                          others.empty() ? "" : "; neither have others: " + others),
              awaited);
}

void Team::wake_all() {
  for (Rank peer = 0; peer < size_; ++peer) futex_wake_all(line(peer).published);
}

}  // namespace muster
