#include "muster/shm/host_comm.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

#include "muster/base/check.h"
#include "muster/io/host_identity.h"
#include "muster/shm/futex.h"

namespace muster {
namespace {

/// A rank says every so many steps where it runs.
constexpr uint32_t kNoteCoreEvery = 8;

/// A call may begin so many steps later until what is known of others is refreshed; no call takes as many.
constexpr uint32_t kRefreshAfter = uint32_t{1} << 24;

/// Any difference in any word, or in the digest of what came before, changes it, but for one chance in 2^64 or so.
uint64_t digest(const HostComm::Tag& tag, uint64_t before) {
  // Products that do not wait for each other: the processor makes them side by side.
  const uint64_t sum = before * 0x9e3779b97f4a7c15 + tag[0] * 0xff51afd7ed558ccd + tag[1] * 0xc4ceb9fe1a85ec53 +
                       tag[2] * 0xbf58476d1ce4e5b9 + tag[3] * 0x94d049bb133111eb;
  return sum ^ sum >> 32;
}

}  // namespace

Result<Fd> HostComm::allocate(int size, size_t slot_bytes) {
  MUSTER_CHECK(size > 0, "a team needs ranks");
  const HostCommShape shape = host_comm_shape(size, usable_cores(), slot_bytes);
  return HostCommMemory::allocate(size, shape.slot_bytes, shape.hub);
}

Result<std::unique_ptr<HostComm>> HostComm::attach(const Fd& memory, Rank rank, int size, Watch watch) {
  MUSTER_CHECK(rank >= 0 && rank < size, "a rank lies within its team");
  MUSTER_ASSIGN(auto shared, HostCommMemory::map(memory, size));
  MUSTER_TRY(shared->populate(memory, rank));
  return std::unique_ptr<HostComm>(new HostComm(std::move(shared), rank, size, std::move(watch)));
}

HostComm::HostComm(std::shared_ptr<HostCommMemory> memory, Rank rank, int size, Watch watch)
    : memory_(std::move(memory)),
      rank_(rank),
      size_(size),
      watch_(std::move(watch)),
      // Many parked ranks that look around often would leave no time for those that work.
      watch_slice_(kParkSlice * std::max(1, size / kMaxFlatRanks)),
      // Spinning only pays while every rank has a core to spin on.
      own_cores_(size <= usable_cores()),  // until the others' cores are known
      core_set_{},
      // In turn, ranks that share a core all have it before one has it again.
      adaptive_wait_(own_cores_, kMaxTurn * std::max(1, size / usable_cores())),
      seen_(static_cast<size_t>(size), 0),
      pointers_(static_cast<size_t>(size)),
      cores_(static_cast<size_t>(size)),
      pid_namespace_(pid_namespace()) {
  HostCommRank& own = memory_->rank(rank_);
  own.pid = getpid();
  publish_core_set();
}

void HostComm::open(const Tag& tag) {
  tag_ = tag;
  fingerprint_ = digest(tag, fingerprint_);
  own_direct_ = direct_word();
  if (step_ - refreshed_ >= kRefreshAfter) refresh();
}

/// Who learns from one rank that all have come, as in every broadcast, looks at no other and never meets: what it has
/// seen of them, and the hub's word, would stand still until the steps have gone half round and it seems to be ahead.
void HostComm::refresh() {
  refreshed_ = step_;
  for (uint32_t& seen : seen_) {
    if (!at_least(seen, all_published_step_)) seen = all_published_step_;
  }
  if (!has_leader() || rank_ != 0) return;
  std::atomic<uint32_t>& met = memory_->rank(0).met;
  if (!at_least(met.load(std::memory_order_relaxed), all_published_step_)) announce(met, all_published_step_);
}

void HostComm::publish() {
  StepRecord& own = line(rank_, step_);
  for (size_t i = 0; i < tag_.size(); ++i) own.tag[i].store(tag_[i], std::memory_order_relaxed);
  own.fingerprint = fingerprint_;
  own.floor = all_published_step_;
  own.direct = own_direct_;
  if (step_ % kNoteCoreEvery == 0) publish_cpu();
  announce(own.step, step_);
}

/// Does not make sure that the word can be seen before it looks for waiters: that would cost every step the time that a
/// line takes to the other core and back. So a wait may miss its wake, and sleeps no longer than kFirstParkSlice for
/// that:
///
///   publisher: S: word = step     L: reads waiters        then wakes if it is not 0; S is visible some time after L
///   waiter:    W: waiters += 1    R: reads word, sleeps while it is unchanged; the kernel looks at it once more
///
/// - L sees W or a later value: it is not 0 until the wait is over, as every waiter stays counted from before its first
///   look to after its last. So the publisher wakes. The kernel has a full barrier in FUTEX_WAKE before it looks for
///   sleepers, and in FUTEX_WAIT between queueing and the last look at the word: the waiter either finds S or is woken.
/// - L does not see W: it came before W (coherence of `waiters`), and so did S in the publisher's program. What is
///   missing is only the time until S leaves the core's store buffer: microseconds at most, as a switch to another
///   thread drains it too. A sleep that begins kFirstParkSlice after W or later finds S. Those that begin sooner are
///   short.
void HostComm::announce(std::atomic<uint32_t>& word, uint32_t step) {
  word.store(step, std::memory_order_release);
  if (memory_->rank(rank_).waiters.load(std::memory_order_relaxed) != 0) futex_wake_all(word);
}

void HostComm::fetch_ahead() {
  const StepRecord& following = line(rank_, step_ + 2);
  fetch_to_write(&following);
  fetch_to_write(&following.tag);
}

Result<> HostComm::wait(Rank peer, uint32_t step, const Deadline& deadline) {
  if (!has_come(peer, step)) MUSTER_TRY(await(peer, step, deadline));
  const StepRecord& theirs = line(peer, step);
  if (at_least(theirs.floor, all_published_step_)) all_published_step_ = theirs.floor;
  if (theirs.fingerprint != fingerprint_) return differs(peer, step);
  return {};
}

Result<> HostComm::wait_all(uint32_t step, const Deadline& deadline) {
  const bool hub = has_leader();
  if (hub && rank_ != 0) return await_leader(step, deadline);
  Result<> settled = settle(step, deadline, true);
  if (!settled) return settled;
  hub ? announce(memory_->rank(0).met, step) : update_all_direct(step);
  return settled;
}

/// By way of a hub nobody sees all ranks' words, so there it stays zero.
uint32_t HostComm::direct_word() const {
  const bool possible = direct_ && arena_ && arena_->in_use() && !has_leader();
  return possible ? static_cast<uint32_t>(pid_namespace_) : 0;
}

void HostComm::update_all_direct(uint32_t step) {
  all_direct_ = own_direct_ != 0;
  for (Rank peer = 0; peer < size_ && all_direct_; ++peer) {
    all_direct_ = peer == rank_ || line(peer, step).direct == own_direct_;
  }
}

Result<> HostComm::settle(uint32_t step, const Deadline& deadline, bool compare) {
  for (Rank peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if (!has_come(peer, step)) MUSTER_TRY(await(peer, step, deadline));
    if (compare && line(peer, step).fingerprint != fingerprint_) return differs(peer, step);
  }
  if (at_least(step, all_published_step_)) all_published_step_ = step;
  return {};
}

tl::unexpected<Error> HostComm::differs(Rank peer, uint32_t step) {
  const StepRecord& theirs = line(peer, step);
  Tag& foreign = foreign_tag_.emplace();
  for (size_t i = 0; i < foreign.size(); ++i) foreign[i] = theirs.tag[i].load(std::memory_order_relaxed);
  return fail(ErrorCode::kMismatch, fmt::format("rank {} is in another call", peer), peer);
}

bool HostComm::has_come(Rank peer, uint32_t step) {
  if (at_least(seen_[peer], step)) return true;
  if (!at_least(line(peer, step).step.load(std::memory_order_acquire), step)) return false;
  seen_[peer] = step;
  return true;
}

Result<> HostComm::await(Rank peer, uint32_t step, const Deadline& deadline) {
  MUSTER_TRY(wait_on(line(peer, step).step, peer, step, deadline));
  seen_[peer] = step;
  return {};
}

Result<> HostComm::await_leader(uint32_t step, const Deadline& deadline) {
  MUSTER_TRY(wait_on(memory_->rank(0).met, 0, step, deadline));
  if (at_least(step, all_published_step_)) all_published_step_ = step;
  if (line(0, step).fingerprint != fingerprint_) return differs(0, step);
  return {};
}

Result<> HostComm::wait_on(std::atomic<uint32_t>& word, Rank owner, uint32_t step, const Deadline& deadline) {
  const auto reached = [&] { return at_least(word.load(std::memory_order_acquire), step); };
  if (reached()) return {};
  if (adaptive_wait_.spin(reached)) return {};
  if (idle_spins_++ % kIdleSpinsPerCoreCheck == 0) learn_core_sets();
  if (own_cores_) migrate_away_from(owner);
  if (adaptive_wait_.yield(reached)) return {};
  return park(word, owner, step, deadline);
}

void HostComm::publish_cpu() {
  const uint32_t core = CpuMigrator::current();
  if (core == core_) return;
  core_ = core;
  memory_->rank(rank_).core.store(core, std::memory_order_relaxed);
  if (core < CPU_SETSIZE && !CPU_ISSET(core, &core_set_)) publish_core_set();  // it was bound anew
}

void HostComm::publish_core_set() {
  const cpu_set_t now = usable_core_set();
  if (CPU_EQUAL(&now, &core_set_)) return;
  core_set_ = now;
  const auto words = std::bit_cast<std::array<uint64_t, sizeof(now) / sizeof(uint64_t)>>(now);
  auto& shared = memory_->rank(rank_).usable_cores;
  for (size_t i = 0; i < words.size(); ++i) shared[i].store(words[i], std::memory_order_relaxed);
}

/// A rank that is bound to some cores sees only those: what matters is how many all ranks have together.
void HostComm::learn_core_sets() {
  publish_core_set();
  std::array<uint64_t, sizeof(cpu_set_t) / sizeof(uint64_t)> together{};
  for (Rank peer = 0; peer < size_; ++peer) {
    uint64_t any = 0;
    for (size_t i = 0; i < together.size(); ++i) {
      const uint64_t word = memory_->rank(peer).usable_cores[i].load(std::memory_order_relaxed);
      together[i] |= word;
      any |= word;
    }
    if (any == 0) {  // it has not attached yet
      idle_spins_ = 0;
      return;
    }
  }
  int cores = 0;
  for (const uint64_t word : together) cores += std::popcount(word);
  const bool own = size_ <= cores;
  if (own == own_cores_) return;
  own_cores_ = own;
  adaptive_wait_.set_own_core(own);
}

/// Off the core that the awaited rank needs, if it is this one: to one that no rank uses.
void HostComm::migrate_away_from(Rank awaited) {
  publish_cpu();
  if (memory_->rank(awaited).core.load(std::memory_order_relaxed) != core_) return;
  for (Rank peer = 0; peer < size_; ++peer) cores_[peer] = memory_->rank(peer).core.load(std::memory_order_relaxed);
  cpu_migrator_.migrate_away(cores_);
  publish_cpu();
}

Result<> HostComm::park(std::atomic<uint32_t>& word, Rank owner, uint32_t step, const Deadline& deadline) {
  const auto reached = [&] { return at_least(word.load(std::memory_order_acquire), step); };
  std::atomic<uint32_t>& waiters = memory_->rank(owner).waiters;
  waiters.fetch_add(1, std::memory_order_seq_cst);
  const TimePoint counted = steady_clock().now();
  Result<> result;
  for (;;) {
    const uint32_t value = word.load(std::memory_order_seq_cst);
    if (at_least(value, step)) break;
    const bool just_counted = steady_clock().now() - counted < kFirstParkSlice;
    futex_wait(word, value, std::min(just_counted ? kFirstParkSlice : watch_slice_, deadline.left()));
    if (reached()) break;
    result = watch_(owner);
    if (reached()) result = {};
    if (reached() || !result) break;
    if (deadline.passed()) {
      result = late(owner, step);
      break;
    }
  }
  waiters.fetch_sub(1, std::memory_order_relaxed);
  return result;
}

tl::unexpected<Error> HostComm::late(Rank awaited, uint32_t step) const {
  std::vector<Rank> behind;
  for (Rank peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && !at_least(line(peer, step).step.load(std::memory_order_acquire), step)) behind.push_back(peer);
  }
  if (behind.empty()) behind.push_back(awaited);  // the hub is here, and has not yet said that all are
  std::string others;
  for (size_t i = 1; i < behind.size(); ++i) others += fmt::format("{}{}", i == 1 ? "" : ", ", behind[i]);
  return fail(ErrorCode::kTimeout,
              fmt::format("rank {} has not arrived in time{}", behind[0],
                          others.empty() ? "" : "; neither have others: " + others),
              behind[0]);
}

void HostComm::give_up(Rank blamed) {
  const uint32_t word = blamed < 0 ? kBlamesNobody : static_cast<uint32_t>(blamed) + 1;
  memory_->rank(rank_).gave_up.store(word, std::memory_order_release);
  wake_all();
}

Rank HostComm::blamed_by(Rank quitter) const {
  const uint32_t word = memory_->rank(quitter).gave_up.load(std::memory_order_acquire);
  return word == 0 || word == kBlamesNobody ? kNoRank : static_cast<Rank>(word - 1);
}

Rank HostComm::quitter() const {
  for (Rank peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && memory_->rank(peer).gave_up.load(std::memory_order_acquire) != 0) return peer;
  }
  return kNoRank;
}

Result<> HostComm::check() {
  std::atomic_thread_fence(std::memory_order_acquire);  // after what was read
  const Rank gone = quitter();
  if (gone == kNoRank) return {};
  MUSTER_TRY(watch_(gone));
  return fail(ErrorCode::kAborted, fmt::format("rank {} has given up", gone), gone);
}

void HostComm::wake_all() {
  for (Rank peer = 0; peer < size_; ++peer) {
    // Who comes to wait just now looks around by itself soon.
    if (memory_->rank(peer).waiters.load(std::memory_order_seq_cst) == 0) continue;
    futex_wake_all(memory_->rank(peer).met);
    for (StepRecord& each : memory_->rank(peer).lines) futex_wake_all(each.step);
  }
}

}  // namespace muster
