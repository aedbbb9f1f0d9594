#include "muster/shm/host_comm.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "muster/base/check.h"
#include "muster/io/host_identity.h"
#include "muster/shm/futex.h"

namespace muster {
namespace {

/// A rank publishes its core every so many steps.
constexpr uint32_t kStepsPerCoreUpdate = 8;

/// A call that begins this many steps after the last refresh() calls it again. No call takes as many steps.
constexpr uint32_t kRefreshInterval = uint32_t{1} << 24;

/// A difference in any word, or in the previous digest, changes the result, except with a probability of some 2^-64.
uint64_t digest(const HostComm::Tag& tag, uint64_t before) {
  // The products do not depend on each other, so the processor computes them in parallel.
  const uint64_t sum = before * 0x9e3779b97f4a7c15 + tag[0] * 0xff51afd7ed558ccd + tag[1] * 0xc4ceb9fe1a85ec53 +
                       tag[2] * 0xbf58476d1ce4e5b9 + tag[3] * 0x94d049bb133111eb;
  return sum ^ sum >> 32;
}

}  // namespace

Result<Fd> HostComm::allocate(int size, size_t slot_bytes) {
  MUSTER_CHECK(size > 0, "a host communicator needs ranks");
  return HostCommMemory::allocate(size, host_comm_shape(size, usable_cores(), slot_bytes).slot_bytes);
}

Result<std::unique_ptr<HostComm>> HostComm::attach(const Fd& memory, Rank rank, int size, Progress progress) {
  MUSTER_CHECK(rank >= 0 && rank < size, "a rank must be below the size of its host communicator");
  MUSTER_ASSIGN(auto shared, HostCommMemory::map(memory, size));
  MUSTER_TRY(shared->populate(memory, rank));
  return std::unique_ptr<HostComm>(new HostComm(std::move(shared), rank, size, std::move(progress)));
}

HostComm::HostComm(std::shared_ptr<HostCommMemory> memory, Rank rank, int size, Progress progress)
    : memory_(std::move(memory)),
      rank_(rank),
      size_(size),
      progress_(std::move(progress)),
      // Many parked ranks that drive their links often would leave no time for the ranks that work.
      park_slice_(kParkSlice * std::max(1, size / kMaxFlatRanks)),
      rank_cores_(*memory_, rank, size),
      // The ranks that share a core take turns, so one yield may last one turn of each of them.
      adaptive_wait_(rank_cores_.has_own_cores(), kMaxTurn * std::max(1, size / usable_cores())),
      seen_steps_(static_cast<size_t>(size), 0),
      pointers_(static_cast<size_t>(size)),
      pid_namespace_(pid_namespace()) {
  memory_->rank(rank_).pid = getpid();
  memory_->join();  // rank_cores_ has published the cores of this rank
}

void HostComm::open(const Tag& tag) {
  tag_ = tag;
  fingerprint_ = digest(tag, fingerprint_);
  own_direct_ = direct_word();
  if (step_ - refreshed_step_ >= kRefreshInterval) refresh();
}

/// A rank may learn from one record that all ranks have published, as in every broadcast. Then it reads no other rank's
/// record, and its seen_steps_ and the leader's word stay behind. Without a refresh, at_least() would take them for
/// ahead after 2^31 steps.
void HostComm::refresh() {
  refreshed_step_ = step_;
  for (uint32_t& seen : seen_steps_) {
    if (!at_least(seen, all_published_step_)) seen = all_published_step_;
  }
  if (!has_leader() || rank_ != 0) return;
  std::atomic<uint32_t>& word = memory_->rank(0).all_published_step;
  if (!at_least(word.load(std::memory_order_relaxed), all_published_step_)) publish_word(word, all_published_step_);
}

void HostComm::publish() {
  StepRecord& own = record(rank_, step_);
  for (size_t i = 0; i < tag_.size(); ++i) own.tag[i].store(tag_[i], std::memory_order_relaxed);
  own.fingerprint = fingerprint_;
  own.all_published_step = all_published_step_;
  own.direct = own_direct_;
  if (step_ % kStepsPerCoreUpdate == 0) rank_cores_.publish();
  publish_word(own.step, step_);
}

/// Stores `step` and wakes the ranks that are parked on the word. There is no fence between the store and the load of
/// `waiters`: it would cost every step the time of a cache-line transfer. So a waiter may miss its wake-up. Therefore
/// the first sleeps of a waiter last kFirstParkSlice at most:
///
///   publisher: S: word = step     L: loads waiters         wakes if not 0. S becomes visible some time after L
///   waiter:    W: waiters += 1    R: loads word            sleeps while it is unchanged; the kernel compares once more
///
/// - If L sees W or a later value, this value is not 0 while the wait lasts, because each waiter stays counted from
///   before its first load to after its last one. So the publisher wakes. The kernel has a full barrier in FUTEX_WAKE
///   before it searches for sleepers, and in FUTEX_WAIT between queueing and its last load of the word: the waiter
///   either finds S or is woken.
/// - If L does not see W, then L precedes W (coherence of `waiters`), and S precedes L in program order. So S is only
///   not visible until it leaves the core's store buffer. That takes microseconds at most, because a switch to another
///   thread drains the buffer too. A sleep that begins kFirstParkSlice after W or later finds S. Earlier sleeps are
///   short.
void HostComm::publish_word(std::atomic<uint32_t>& word, uint32_t step) {
  word.store(step, std::memory_order_release);
  if (memory_->rank(rank_).waiters.load(std::memory_order_relaxed) != 0) futex_wake_all(word);
}

void HostComm::fetch_ahead() {
  const StepRecord& following = record(rank_, step_ + 2);
  fetch_to_write(&following);
  fetch_to_write(&following.tag);
}

Result<> HostComm::wait(Rank peer, uint32_t step, const Deadline& deadline) {
  if (!has_published(peer, step)) MUSTER_TRY(wait_on_record(peer, step, deadline));
  const StepRecord& theirs = record(peer, step);
  if (at_least(theirs.all_published_step, all_published_step_)) all_published_step_ = theirs.all_published_step;
  if (theirs.fingerprint != fingerprint_) return mismatch_error(peer, step);
  return {};
}

Result<> HostComm::wait_all(uint32_t step, const Deadline& deadline) {
  const bool leads = has_leader();
  if (leads && rank_ != 0) return wait_for_leader(step, deadline);
  Result<> waited = wait_for_others(step, deadline, true);
  if (!waited) return waited;
  leads ? publish_word(memory_->rank(0).all_published_step, step) : update_all_direct(step);
  return waited;
}

/// The value of StepRecord::direct. Zero with a leader, because then most ranks do not read the records of all others.
uint32_t HostComm::direct_word() const {
  const bool possible = direct_ && arena_ && arena_->in_use() && !has_leader();
  return possible ? static_cast<uint32_t>(pid_namespace_) : 0;
}

void HostComm::update_all_direct(uint32_t step) {
  all_direct_ = own_direct_ != 0;
  for (Rank peer = 0; peer < size_ && all_direct_; ++peer) {
    all_direct_ = peer == rank_ || record(peer, step).direct == own_direct_;
  }
}

Result<> HostComm::wait_for_others(uint32_t step, const Deadline& deadline, bool compare) {
  for (Rank peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if (!has_published(peer, step)) MUSTER_TRY(wait_on_record(peer, step, deadline));
    if (compare && record(peer, step).fingerprint != fingerprint_) return mismatch_error(peer, step);
  }
  if (at_least(step, all_published_step_)) all_published_step_ = step;
  return {};
}

tl::unexpected<Error> HostComm::mismatch_error(Rank peer, uint32_t step) {
  const StepRecord& theirs = record(peer, step);
  Tag& foreign = foreign_tag_.emplace();
  for (size_t i = 0; i < foreign.size(); ++i) foreign[i] = theirs.tag[i].load(std::memory_order_relaxed);
  return fail(ErrorCode::kMismatch, fmt::format("rank {} is in another call", peer), peer);
}

bool HostComm::has_published(Rank peer, uint32_t step) {
  if (at_least(seen_steps_[peer], step)) return true;
  if (!at_least(record(peer, step).step.load(std::memory_order_acquire), step)) return false;
  seen_steps_[peer] = step;
  return true;
}

Result<> HostComm::wait_on_record(Rank peer, uint32_t step, const Deadline& deadline) {
  MUSTER_TRY(wait_on(record(peer, step).step, peer, step, deadline));
  seen_steps_[peer] = step;
  return {};
}

Result<> HostComm::wait_for_leader(uint32_t step, const Deadline& deadline) {
  MUSTER_TRY(wait_on(memory_->rank(0).all_published_step, 0, step, deadline));
  if (at_least(step, all_published_step_)) all_published_step_ = step;
  if (record(0, step).fingerprint != fingerprint_) return mismatch_error(0, step);
  return {};
}

Result<> HostComm::wait_on(std::atomic<uint32_t>& word, Rank owner, uint32_t step, const Deadline& deadline) {
  const auto reached = [&] { return at_least(word.load(std::memory_order_acquire), step); };
  if (reached()) return {};
  if (adaptive_wait_.spin(reached)) return {};
  if (rank_cores_.recheck_after_idle_spin()) adaptive_wait_.set_own_core(rank_cores_.has_own_cores());
  if (rank_cores_.has_own_cores()) rank_cores_.migrate_away_from(owner);
  if (adaptive_wait_.yield(reached)) return {};
  return park(word, owner, step, deadline);
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
    futex_wait(word, value, std::min(just_counted ? kFirstParkSlice : park_slice_, deadline.left()));
    if (reached()) break;
    result = progress_(owner);
    if (reached()) result = {};
    if (reached() || !result) break;
    if (deadline.passed()) {
      result = timeout_error(owner, step);
      break;
    }
  }
  waiters.fetch_sub(1, std::memory_order_relaxed);
  return result;
}

tl::unexpected<Error> HostComm::timeout_error(Rank awaited, uint32_t step) const {
  std::vector<Rank> behind;
  for (Rank peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && !at_least(record(peer, step).step.load(std::memory_order_acquire), step))
      behind.push_back(peer);
  }
  if (behind.empty()) behind.push_back(awaited);  // all have arrived, but the leader has not published that
  std::string others;
  for (size_t i = 1; i < behind.size(); ++i) others += fmt::format("{}{}", i == 1 ? "" : ", ", behind[i]);
  return fail(ErrorCode::kTimeout,
              fmt::format("rank {} has not arrived in time{}", behind[0],
                          others.empty() ? "" : "; neither have others: " + others),
              behind[0]);
}

void HostComm::mark_failed(Rank blamed) {
  const uint32_t word = blamed < 0 ? kBlamesNoRank : static_cast<uint32_t>(blamed) + 1;
  memory_->rank(rank_).failure.store(word, std::memory_order_release);
  wake_all();
}

Rank HostComm::rank_blamed_by(Rank peer) const {
  const uint32_t word = memory_->rank(peer).failure.load(std::memory_order_acquire);
  return word == 0 || word == kBlamesNoRank ? kNoRank : static_cast<Rank>(word - 1);
}

Rank HostComm::failed_peer() const {
  for (Rank peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && memory_->rank(peer).failure.load(std::memory_order_acquire) != 0) return peer;
  }
  return kNoRank;
}

Result<> HostComm::check() {
  std::atomic_thread_fence(std::memory_order_acquire);  // orders earlier reads of data before the loads of `failure`
  const Rank gone = failed_peer();
  if (gone == kNoRank) return {};
  MUSTER_TRY(progress_(gone));
  return fail(ErrorCode::kAborted, fmt::format("rank {} has failed", gone), gone);
}

void HostComm::wake_all() {
  for (Rank peer = 0; peer < size_; ++peer) {
    // A rank that has only just begun to wait soon calls its Progress callback without a wake-up.
    if (memory_->rank(peer).waiters.load(std::memory_order_seq_cst) == 0) continue;
    futex_wake_all(memory_->rank(peer).all_published_step);
    for (StepRecord& each : memory_->rank(peer).records) futex_wake_all(each.step);
  }
}

}  // namespace muster
