// Clients of a root and of two tiers of proxies add to counters. Meanwhile the test cuts connections, stalls links, and
// stops and kills processes, including the root. Every acknowledged add must be counted exactly once.
// MUSTER_SOAK_SECONDS makes the test longer.
#include <gtest/gtest.h>
#include <poll.h>

#include <array>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "io/unauthenticated_peers.h"
#include "store/expect.h"
#include "store/fault_relay.h"
#include "store/linear_run.h"
#include "store/store_process.h"
#include "store/test_server.h"

namespace muster {
namespace {

Deadline soon() { return test_deadline(); }
TimePoint now() { return steady_clock().now(); }

constexpr size_t kTiers = 3;  // the root, its proxy, and a proxy of that proxy
constexpr int kClientsPerTier = 2;

/// The numbers of adds to a counter: acknowledged adds, and adds without an answer.
struct Tally {
  int64_t acknowledged = 0, unknown = 0;
};

/// Each server is a process and is behind two relays. The tier below connects through a relay with faults. Clients
/// connect through a relay without faults.
class Tiers {
 public:
  explicit Tiers(uint64_t seed) {
    const RelayFaults bad{.cut = 0.002, .split = 0.05, .delay = 0.05};
    const Address nowhere = *Address::parse("127.0.0.1:1");
    for (size_t tier = 0; tier < kTiers; ++tier) {
      upward_[tier] = std::make_unique<FaultRelay>(nowhere, bad, seed + tier);
      clients_[tier] = std::make_unique<FaultRelay>(nowhere, RelayFaults{}, seed);
    }
    start_from(0);
  }
  std::string url(size_t tier) const { return clients_[tier]->url(); }
  FaultRelay& link(size_t tier) { return *upward_[tier]; }
  StoreProcess& process(size_t tier) { return *processes_[tier]; }
  uint64_t cuts() const {
    uint64_t all = 0;
    for (const auto& relay : upward_) all += relay->cuts();
    return all;
  }

  /// Kills the tier. The tiers below have lost their sessions and are restarted too.
  void restart(size_t tier) {
    processes_[tier]->kill();
    start_from(tier);
  }

 private:
  void start_from(size_t first) {
    for (size_t tier = first; tier < kTiers; ++tier) {
      processes_[tier] = std::make_unique<StoreProcess>(tier == 0 ? "" : upward_[tier - 1]->url());
      upward_[tier]->retarget(processes_[tier]->address());
      clients_[tier]->retarget(processes_[tier]->address());
    }
  }

  std::array<std::unique_ptr<FaultRelay>, kTiers> upward_, clients_;
  std::array<std::unique_ptr<StoreProcess>, kTiers> processes_;
};

/// Client threads that add until they are stopped, and the tallies of their counters. After an error a client opens its
/// store again and uses a new counter. So a client's own counter has at most one add without an answer.
class Clients {
 public:
  explicit Clients(const Tiers& tiers) {
    for (size_t tier = 0; tier < kTiers; ++tier) {
      for (int i = 0; i < kClientsPerTier; ++i) {
        threads_.emplace_back([this, url = tiers.url(tier), number = threads_.size()] { run(url, number); });
      }
    }
  }
  ~Clients() {
    resume();
    stop_ = true;
    for (auto& thread : threads_) thread.join();
  }

  int64_t acknowledged() const { return acknowledged_; }
  int64_t unknown() const { return unknown_; }
  int64_t doubled() const { return doubled_; }
  int64_t lost() const { return lost_; }

  /// Waits until `count` adds were acknowledged. False at the deadline.
  bool reach(int64_t count, const Deadline& deadline) {
    std::unique_lock lock(mutex_);
    while (acknowledged_ < count && !deadline.passed()) {
      changed_.wait_for(lock, std::min<Duration>(deadline.left(), 1s));
    }
    return acknowledged_ >= count;
  }
  /// Pauses the clients until resume(). Returns once no client is in a call.
  void pause() {
    std::unique_lock lock(mutex_);
    paused_ = true;
    changed_.wait(lock, [&] { return busy_ == 0; });
  }
  void resume() {
    const std::lock_guard lock(mutex_);
    paused_ = false;
    changed_.notify_all();
  }
  /// Compares the counters of this root with their tallies. Call this while the clients are paused.
  void check(Store& root, const std::string& life) {
    for (const auto& [key, tally] : tallies_) {
      if (!key.starts_with(life + "/")) continue;
      const auto value = root.add(key, 0, soon());
      ASSERT_TRUE(value.has_value()) << value.error().to_string();
      judge(key, tally, *value);
    }
  }
  /// Removes the tallies of a root that was killed.
  void forget(const std::string& life) {
    const std::lock_guard lock(mutex_);
    std::erase_if(tallies_, [&](const auto& entry) { return entry.first.starts_with(life + "/"); });
  }

 private:
  void run(const std::string& url, size_t number) {
    for (int counter = 0; !stop_; ++counter) {
      auto store = open_store(url, test_secret(), Deadline::after(5s));
      if (!store) continue;
      const auto life = (*store)->get("life", Deadline::after(5s));
      if (!life) continue;
      const Key mine = to_string(*life) + "/" + std::to_string(number) + "/" + std::to_string(counter);
      const Key all = to_string(*life) + "/all";
      while (!stop_ && add(**store, mine, /*alone=*/true) && add(**store, all, /*alone=*/false)) continue;
    }
  }

  // False if the add was not acknowledged.
  bool add(Store& store, const Key& key, bool alone) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !paused_; });
      ++busy_;
    }
    const auto value = store.add(key, 1, Deadline::after(20s));
    const std::lock_guard lock(mutex_);
    --busy_;
    changed_.notify_all();
    Tally& tally = tallies_[key];
    ++(value ? tally.acknowledged : tally.unknown);
    ++(value ? acknowledged_ : unknown_);
    if (value && alone) judge(key, tally, *value);
    return value.has_value();
  }

  void judge(const Key& key, const Tally& tally, int64_t value) {
    const int64_t missing = std::max<int64_t>(tally.acknowledged - value, 0);
    const int64_t surplus = std::max<int64_t>(value - tally.acknowledged - tally.unknown, 0);
    lost_ += missing;
    doubled_ += surplus;
    EXPECT_EQ(missing, 0) << key << " is " << value << " after " << tally.acknowledged << " acknowledged adds";
    EXPECT_EQ(surplus, 0) << key << " is " << value << " after " << tally.acknowledged << " acknowledged adds and "
                          << tally.unknown << " others";
  }

  std::mutex mutex_;  // guards paused_, busy_ and tallies_
  std::condition_variable changed_;
  bool paused_ = false;
  int busy_ = 0;
  std::map<Key, Tally> tallies_;
  std::atomic<int64_t> acknowledged_ = 0, unknown_ = 0, lost_ = 0, doubled_ = 0;
  std::atomic<bool> stop_ = false;
  std::vector<std::thread> threads_;
};

class Soak : public testing::Test {
 protected:
  enum Fault { kCut, kStall, kStop, kKillProxy, kKillRoot, kFaults };
  static constexpr const char* kNames[] = {"cuts of all links", "stalled links", "stopped processes", "killed proxies",
                                           "killed roots"};

  void set_life() {
    root_ = open_or_fail(tiers_.process(0).url());
    ASSERT_NE(root_, nullptr);
    life_ = std::to_string(++lives_);
    EXPECT_OK(root_->set("life", to_bytes(life_), soon()));
  }

  void for_a_while() { ::poll(nullptr, 0, static_cast<int>(random_.between(5, 300))); }

  void inject(Fault fault) {
    ++injected_[fault];
    const size_t link = random_.below(kTiers - 1), tier = random_.below(kTiers);
    switch (fault) {
      case kCut:
        return tiers_.link(link).cut_all();
      case kStall:
        tiers_.link(link).hold(true);
        for_a_while();
        return tiers_.link(link).hold(false);
      case kStop:
        tiers_.process(tier).stop();
        for_a_while();
        return tiers_.process(tier).resume();
      case kKillProxy:
        return tiers_.restart(random_.between(1, kTiers - 1));
      default:
        clients_->pause();
        clients_->check(*root_, life_);
        clients_->resume();
        progress(50);  // the root is killed while clients are active
        tiers_.restart(0);
        clients_->forget(life_);
        set_life();
    }
  }

  // Expects that the clients complete `adds` more adds, in spite of the faults.
  void progress(int64_t adds) {
    ASSERT_TRUE(clients_->reach(clients_->acknowledged() + adds, Deadline::after(120s))) << "the clients do not get on";
  }

  const uint64_t seed_ = seed_or(1);
  Random random_{seed_};
  Tiers tiers_{seed_};
  std::unique_ptr<Store> root_;
  std::string life_;
  int lives_ = 0;
  std::optional<Clients> clients_;
  std::array<uint64_t, kFaults> injected_{};
};

TEST_F(Soak, CountsEveryAcknowledgedAddOnce) {
  std::printf("MUSTER_SEED=%llu\n", static_cast<unsigned long long>(seed_));
  set_life();
  clients_.emplace(tiers_);
  const TimePoint end = now() + soak_time();
  // Injects each fault at least once. Later the root is killed only rarely.
  for (int step = 0; step < kFaults || now() < end; ++step) {
    const bool any = step >= kFaults;
    const auto fault = any ? static_cast<Fault>(random_.below(random_.chance(0.1) ? kFaults : kKillRoot)) : Fault(step);
    inject(fault);
    progress(100);
    if (HasFailure()) break;
  }
  clients_->pause();
  clients_->check(*root_, life_);
  const int64_t done = clients_->acknowledged(), unknown = clients_->unknown();
  std::string faults;
  for (int i = 0; i < kFaults; ++i) faults += (i == 0 ? "" : ", ") + std::to_string(injected_[i]) + " " + kNames[i];
  std::printf(
      "soak: store, seed %llu: %lld adds acknowledged, %lld ended with an error, %lld lost, %lld doubled; faults: %s, "
      "%llu cuts in all\n",
      static_cast<unsigned long long>(seed_), static_cast<long long>(done), static_cast<long long>(unknown),
      static_cast<long long>(clients_->lost()), static_cast<long long>(clients_->doubled()), faults.c_str(),
      static_cast<unsigned long long>(tiers_.cuts()));
  EXPECT_GT(done, 0);
  clients_.reset();
}

}  // namespace
}  // namespace muster
