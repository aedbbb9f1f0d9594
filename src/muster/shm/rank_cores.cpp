#include "muster/shm/rank_cores.h"

#include <array>
#include <bit>
#include <utility>

#include "muster/base/wait_policy.h"

namespace muster {

RankCores::RankCores(HostCommMemory& memory, Rank rank, int size)
    : memory_(memory),
      rank_(rank),
      size_(size),
      own_cores_(size <= usable_cores()),  // until the cores of the other ranks are known
      used_(static_cast<size_t>(size)) {
  publish_usable();
}

void RankCores::publish() {
  const uint32_t core = CpuMigrator::current();
  if (core == core_) return;
  core_ = core;
  memory_.rank(rank_).core.store(core, std::memory_order_relaxed);
  if (core < CPU_SETSIZE && !CPU_ISSET(core, &usable_)) publish_usable();  // this rank was bound to other cores
}

void RankCores::publish_usable() {
  const cpu_set_t now = usable_core_set();
  if (CPU_EQUAL(&now, &usable_)) return;
  usable_ = now;
  const auto words = std::bit_cast<std::array<uint64_t, kCoreWords>>(now);
  auto& shared = memory_.rank(rank_).usable_cores;
  for (size_t i = 0; i < words.size(); ++i) shared[i].store(words[i], std::memory_order_relaxed);
}

bool RankCores::recheck_after_idle_spin() {
  if (idle_spins_++ % kIdleSpinsPerCoreCheck != 0) return false;
  publish_usable();
  const int cores = memory_.count_cores();
  if (cores == 0) {  // a rank has not attached yet
    idle_spins_ = 0;
    return false;
  }
  const bool before = std::exchange(own_cores_, size_ <= cores);
  return before != own_cores_;
}

void RankCores::migrate_away_from(Rank awaited) {
  publish();
  if (memory_.rank(awaited).core.load(std::memory_order_relaxed) != core_) return;
  for (Rank peer = 0; peer < size_; ++peer) used_[peer] = memory_.rank(peer).core.load(std::memory_order_relaxed);
  migrator_.migrate_away(used_);
  publish();
}

}  // namespace muster
