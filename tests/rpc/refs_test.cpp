// The protocol of remote references, without links and threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>

#include "muster/base/random.h"
#include "muster/rpc/refs/held_refs.h"
#include "muster/rpc/refs/owned_refs.h"
#include "muster/rpc/refs/releases.h"

namespace muster::rpc {
namespace {

constexpr Duration kLease = 1s;
const RefId kRef{.creator = 1, .number = 5};

TimePoint at(Duration time) { return TimePoint{} + time; }

class OwnedRefsTest : public testing::Test {
 protected:
  OwnedRefs refs_{"owner", kLease};
};

TEST_F(OwnedRefsTest, AReferenceLivesUntilItsLastHolderReleasesIt) {
  refs_.create(kRef, "a", at(0ms));
  const auto value = std::make_shared<RefValue>();
  refs_.set_value(kRef, value);
  EXPECT_EQ(refs_.value(kRef), value);
  EXPECT_TRUE(refs_.grant(kRef, "b", "a", true, at(0ms)));
  EXPECT_TRUE(refs_.grant(kRef, "b", "a", true, at(0ms)));
  EXPECT_EQ(refs_.release(kRef, "a", 1, at(0ms)), nullptr);
  EXPECT_EQ(refs_.release(kRef, "b", 1, at(0ms)), nullptr);
  EXPECT_TRUE(refs_.contains(kRef));
  EXPECT_EQ(refs_.release(kRef, "b", 1, at(0ms)), value);
  EXPECT_FALSE(refs_.contains(kRef));
  const auto late = refs_.grant(kRef, "c", "b", false, at(0ms));
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ErrorCode::kNotFound);
}

TEST_F(OwnedRefsTest, AGrantMayArriveBeforeTheCreation) {
  EXPECT_TRUE(refs_.grant(kRef, "b", "a", true, at(0ms)));
  refs_.create(kRef, "a", at(0ms));
  refs_.release(kRef, "a", 1, at(0ms));
  EXPECT_TRUE(refs_.contains(kRef));
  refs_.release(kRef, "b", 1, at(0ms));
  EXPECT_FALSE(refs_.contains(kRef));
}

TEST_F(OwnedRefsTest, AReplyToTheOwnerHoldsTheReferenceUntilItArrives) {
  refs_.create(kRef, "a", at(0ms));
  const auto value = std::make_shared<RefValue>();
  refs_.set_value(kRef, value);
  EXPECT_TRUE(refs_.grant(kRef, "owner", "a", true, at(0ms)));
  EXPECT_EQ(refs_.release(kRef, "a", 1, at(500ms)), nullptr) << "the release may overtake the reply";
  EXPECT_TRUE(refs_.claim(kRef, at(1400ms)));
  EXPECT_TRUE(refs_.expire(at(9000ms)).empty());
  EXPECT_EQ(refs_.release(kRef, "owner", 1, at(9000ms)), value);
}

TEST_F(OwnedRefsTest, AReplyThatDoesNotArriveHoldsTheReferenceForALease) {
  refs_.create(kRef, "a", at(0ms));
  refs_.set_value(kRef, std::make_shared<RefValue>());
  EXPECT_TRUE(refs_.grant(kRef, "owner", "a", true, at(0ms)));
  EXPECT_EQ(refs_.release(kRef, "a", 1, at(500ms)), nullptr);
  EXPECT_TRUE(refs_.expire(at(1400ms)).empty());
  EXPECT_EQ(refs_.expire(at(1500ms)).size(), 1);
  EXPECT_FALSE(refs_.claim(kRef, at(1500ms)));
  EXPECT_EQ(refs_.size(), 0);
}

TEST_F(OwnedRefsTest, AHolderThatDoesNotRenewIsRemoved) {
  refs_.create(kRef, "a", at(0ms));
  EXPECT_TRUE(refs_.grant(kRef, "b", "a", true, at(0ms)));
  refs_.renew(kRef, "a", 1, at(900ms));
  EXPECT_TRUE(refs_.expire(at(1500ms)).empty()) << "b is protected by a, and a has renewed";
  refs_.set_value(kRef, std::make_shared<RefValue>());
  EXPECT_EQ(refs_.expire(at(2000ms)).size(), 1) << "nobody has renewed";
  EXPECT_EQ(refs_.size(), 0);
}

TEST_F(OwnedRefsTest, AnUnclaimedGrantGetsALeaseWhenItsGranterReleases) {
  refs_.create(kRef, "a", at(0ms));
  EXPECT_TRUE(refs_.grant(kRef, "b", "a", true, at(0ms)));
  refs_.renew(kRef, "a", 1, at(5000ms));
  (void)refs_.expire(at(5500ms));
  (void)refs_.release(kRef, "a", 1, at(5500ms));
  EXPECT_TRUE(refs_.expire(at(6400ms)).empty());
  EXPECT_TRUE(refs_.contains(kRef));
  (void)refs_.expire(at(6500ms));
  EXPECT_FALSE(refs_.contains(kRef));
}

TEST_F(OwnedRefsTest, ALateReleaseTakesNoLaterGrant) {
  refs_.create(kRef, "owner", at(0ms));
  EXPECT_TRUE(refs_.grant(kRef, "b", "a", false, at(0ms)));
  (void)refs_.expire(at(1500ms));  // b has dropped the reference, but its release is slow
  EXPECT_TRUE(refs_.grant(kRef, "b", "owner", false, at(2000ms)));
  (void)refs_.release(kRef, "owner", 1, at(2000ms));
  (void)refs_.release(kRef, "b", 1, at(2100ms));
  EXPECT_TRUE(refs_.contains(kRef)) << "it was the release of the first grant";
  (void)refs_.release(kRef, "b", 1, at(2200ms));
  EXPECT_FALSE(refs_.contains(kRef));
}

TEST_F(OwnedRefsTest, TheOwnerItselfNeedsNoLease) {
  refs_.create(kRef, "owner", at(0ms));
  (void)refs_.expire(at(100s));
  EXPECT_TRUE(refs_.contains(kRef));
}

TEST(HeldRefsTest, GrantsAreReleasedTogether) {
  HeldRefs refs;
  refs.receive("owner", kRef);
  refs.receive("owner", kRef);
  refs.add_handle("owner", kRef);
  EXPECT_EQ(refs.drop_handle("owner", kRef), 0);
  EXPECT_EQ(refs.drop_handle("owner", kRef), 0);
  EXPECT_EQ(refs.list().front().grants, 2);
  EXPECT_EQ(refs.drop_handle("owner", kRef), 2);
  EXPECT_EQ(refs.size(), 0);
}

TEST(ReleasesTest, AReleaseThatIsSentAgainCountsOnce) {
  SentReleases sent;
  CountedReleases counted;
  const ReleaseNumber first = sent.begin("owner"), second = sent.begin("owner");
  EXPECT_TRUE(counted.insert(1, second)) << "it has overtaken the first one";
  EXPECT_FALSE(counted.insert(1, second));
  EXPECT_TRUE(counted.insert(1, first));
  EXPECT_FALSE(counted.insert(1, first));
  EXPECT_TRUE(counted.insert(2, first)) << "another worker counts for itself";
  sent.end("owner", second.number);
  EXPECT_EQ(sent.begin("owner").oldest, first.number);
  sent.end("owner", first.number);
  const ReleaseNumber fourth = sent.begin("owner");
  EXPECT_GT(fourth.oldest, second.number);
  EXPECT_TRUE(counted.insert(1, fourth));
  EXPECT_FALSE(counted.insert(1, first)) << "it was given up";
}

TEST(ReleasesTest, EachOwnerHasItsOwnOldestRelease) {
  SentReleases sent;
  const ReleaseNumber slow = sent.begin("slow");
  const ReleaseNumber other = sent.begin("other");
  EXPECT_EQ(other.oldest, other.number);
  sent.end("other", other.number);
  EXPECT_FALSE(sent.empty());
  sent.end("slow", slow.number);
  EXPECT_TRUE(sent.empty());
}

TEST(ReleasesTest, AnOwnerRemembersABoundedNumberOfReleases) {
  CountedReleases counted;
  for (uint64_t number = 2; number < 200'000; ++number) ASSERT_TRUE(counted.insert(1, {number, 1}));
  EXPECT_FALSE(counted.insert(1, {1, 1})) << "too old to be told from one that was counted";
  EXPECT_FALSE(counted.insert(1, {199'999, 1}));
}

/// Workers that create, pass and drop references at random. Messages are delayed, reordered and lost, and workers die.
class Simulation {
 public:
  Simulation(int workers, uint32_t seed) : random_(seed) {
    for (int i = 0; i < workers; ++i) workers_.push_back(std::make_unique<Worker>(i));
  }

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      advance();
      act();
      check();
    }
  }

  /// All workers drop all they hold. After some leases, nothing may be left.
  void end() {
    while (!messages_.empty()) advance();
    for (auto& worker : workers_) {
      while (worker->alive && !worker->handles.empty()) drop(*worker, *worker->handles.begin());
    }
    for (Duration time{}; time < 5 * kLease || !messages_.empty(); time += 10ms) advance();
    for (const auto& worker : workers_) {
      if (!worker->alive) continue;
      EXPECT_EQ(worker->held.size(), 0);
      EXPECT_TRUE(worker->sent.empty());
      EXPECT_EQ(worker->owned.size(), 0) << "worker " << worker->index;
    }
  }

  int passed() const { return passed_; }
  int replied() const { return replied_; }
  int repeated() const { return repeated_; }

 private:
  struct Handle {
    int owner;
    RefId id;
    auto operator<=>(const Handle&) const = default;
  };
  struct Worker {
    explicit Worker(int number) : index(number), name("w" + std::to_string(number)), owned(name, kLease) {}
    const int index;
    const std::string name;
    OwnedRefs owned;
    HeldRefs held;
    SentReleases sent;
    CountedReleases counted;
    std::multiset<Handle> handles;  ///< of the program
    std::multiset<Handle> pins;     ///< of calls that are pending
    uint64_t created = 0;
    TimePoint renewed;
    bool alive = true;
    TimePoint died;
  };

  uint64_t below(uint64_t bound) { return random_.below(bound); }
  bool lossy() { return below(10) == 0; }
  Worker& named(const std::string& name) {
    return **std::ranges::find_if(workers_, [&](const auto& each) { return each->name == name; });
  }
  Worker& any() { return *workers_[below(workers_.size())]; }

  /// Most messages arrive soon, and some only after leases have ended. Nothing arrives long after its sender has died,
  /// because its links end with it.
  void send(const Worker& from, Worker& to, std::function<void()> handle) {
    if (!from.alive || lossy()) return;
    const std::chrono::milliseconds delay(below(20) == 0 ? below(3000) : below(30));
    deliver_after(delay, [this, &from, &to, handle = std::move(handle)] {
      if (to.alive && (from.alive || now_ - from.died < kLease / 4)) handle();
    });
  }
  void deliver_after(Duration delay, std::function<void()> handle) {
    messages_.emplace(now_ + delay, std::move(handle));
  }

  void advance() {
    now_ = now_ + 10ms;
    while (!messages_.empty() && messages_.begin()->first <= now_) {
      const auto handle = std::move(messages_.begin()->second);
      messages_.erase(messages_.begin());
      handle();
    }
    for (auto& worker : workers_) {
      if (!worker->alive) continue;
      (void)worker->owned.expire(now_);
      if (now_ - worker->renewed < kLease / 4) continue;
      worker->renewed = now_;
      for (const auto& held : worker->held.list()) {
        Worker& owner = named(held.owner);
        deliver_after(std::chrono::milliseconds(below(30)), [this, &owner, held, name = worker->name] {
          if (owner.alive) owner.owned.renew(held.id, name, held.grants, now_);
        });
      }
    }
  }

  void act() {
    Worker& worker = any();
    if (!worker.alive) return;
    const uint64_t what = below(1000);
    if (what == 0 && std::ranges::count_if(workers_, [](const auto& each) { return each->alive; }) > 1) {
      worker.alive = false;
      worker.died = now_;
    } else if (what < 200) {
      create(worker);
    } else if (!worker.handles.empty()) {
      const Handle handle = *std::next(worker.handles.begin(), below(worker.handles.size()));
      if (what < 500) {
        drop(worker, handle);
      } else if (what < 900) {
        pass(worker, any(), handle);
      } else {
        reply(worker, any(), handle);
      }
    }
  }

  void create(Worker& creator) {
    const Handle handle{static_cast<int>(below(workers_.size())), {creator.index, ++creator.created}};
    Worker& owner = *workers_[handle.owner];
    hold(creator, handle);
    if (&owner == &creator) return;
    pending_.insert(handle.id);
    pin(creator, handle);
    send(creator, owner, [this, &owner, &creator, handle] {
      owner.owned.create(handle.id, creator.name, now_);
      pending_.erase(handle.id);
    });
    deliver_after(4s, [this, &creator, handle] { unpin(creator, handle); });
  }

  /// A granted reference arrives.
  void hold(Worker& worker, const Handle& handle) {
    worker.handles.insert(handle);
    if (handle.owner == worker.index) {
      worker.owned.create(handle.id, worker.name, now_);
    } else {
      worker.held.receive(owner_of(handle), handle.id);
    }
  }
  void drop(Worker& worker, Handle handle) {
    worker.handles.erase(worker.handles.find(handle));
    release(worker, handle);
  }
  /// One more handle, until a call has ended.
  void pin(Worker& worker, const Handle& handle) {
    worker.pins.insert(handle);
    if (handle.owner == worker.index) {
      worker.owned.create(handle.id, worker.name, now_);
    } else {
      worker.held.add_handle(owner_of(handle), handle.id);
    }
  }
  void unpin(Worker& worker, const Handle& handle) {
    if (!worker.alive) return;
    worker.pins.erase(worker.pins.find(handle));
    release(worker, handle);
  }

  void release(Worker& worker, const Handle& handle) {
    Worker& owner = *workers_[handle.owner];
    if (&owner == &worker) return (void)worker.owned.release(handle.id, worker.name, 1, now_);
    const uint64_t grants = worker.held.drop_handle(owner.name, handle.id);
    if (grants == 0) return;
    send_release(worker, owner, handle.id, grants, worker.sent.begin(owner.name), now_ + kLease);
  }
  /// Sends it again until it is answered, so it often arrives more than once.
  void send_release(Worker& worker, Worker& owner, const RefId& id, uint64_t grants, ReleaseNumber release,
                    TimePoint end) {
    const auto answered = std::make_shared<bool>(false);
    send(worker, owner, [=, this, &worker, &owner] {
      if (owner.counted.insert(worker.index, release)) {
        (void)owner.owned.release(id, worker.name, grants, now_);
      } else {
        ++repeated_;
      }
      send(owner, worker, [=, &worker, &owner] {
        *answered = true;
        worker.sent.end(owner.name, release.number);
      });
    });
    deliver_after(100ms, [=, this, &worker, &owner] {
      if (*answered || !worker.alive) return;
      if (now_ < end) return send_release(worker, owner, id, grants, release, end);
      worker.sent.end(owner.name, release.number);
    });
  }

  void pass(Worker& from, Worker& to, const Handle& handle) {
    if (&from == &to) return;
    const auto end = pin_until_ended(from, handle);
    const auto send_it = [this, &from, &to, handle, end] {
      send(from, to, [this, &from, &to, handle, end] {
        hold(to, handle);
        ++passed_;
        send(to, from, end);
      });
    };
    if (handle.owner == to.index) return send_it();
    grant_then(from, to, handle, send_it);
  }

  /// The granter drops its reference as soon as the reply is sent, which arrives within a lease or not at all.
  void reply(Worker& from, Worker& to, const Handle& handle) {
    const auto end = pin_until_ended(from, handle);
    grant_then(from, to, handle, [this, &from, &to, handle, end] {
      if (from.alive && !lossy()) {
        deliver_after(std::chrono::milliseconds(below(200)), [this, &to, handle] {
          if (!to.alive) return;
          ++replied_;
          if (handle.owner != to.index) return hold(to, handle);
          if (to.owned.claim(handle.id, now_)) to.handles.insert(handle);
        });
      }
      end();
    });
  }

  /// Returns what ends the call. The call has a timeout: if a message is lost on the way, its end is not known before.
  std::function<void()> pin_until_ended(Worker& from, const Handle& handle) {
    pin(from, handle);
    const auto ended = std::make_shared<bool>(false);
    const auto end = [this, &from, handle, ended] {
      if (!std::exchange(*ended, true)) unpin(from, handle);
    };
    deliver_after(10s, end);
    return end;
  }

  void grant_then(Worker& from, Worker& to, const Handle& handle, const std::function<void()>& send_it) {
    Worker& owner = *workers_[handle.owner];
    const auto grant = [this, &owner, &from, &to, id = handle.id] {
      return owner.owned.grant(id, to.name, from.name, id.creator == from.index, now_).has_value();
    };
    if (&owner == &from) {
      EXPECT_TRUE(grant());
      return send_it();
    }
    send(from, owner, [this, &owner, &from, grant, send_it] {
      if (grant()) send(owner, from, send_it);
    });
  }

  std::string owner_of(const Handle& handle) const { return workers_[handle.owner]->name; }

  /// No reference ends while a worker holds it.
  void check() {
    for (const auto& worker : workers_) {
      if (!worker->alive) continue;
      for (const auto* handles : {&worker->handles, &worker->pins}) {
        for (const Handle& handle : *handles) check(*worker, handle);
      }
    }
  }
  void check(const Worker& worker, const Handle& handle) {
    const Worker& owner = *workers_[handle.owner];
    if (!owner.alive || pending_.contains(handle.id)) return;
    ASSERT_TRUE(owner.owned.contains(handle.id))
        << worker.name << " holds a reference that " << owner.name << " dropped";
  }

  Random random_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::multimap<TimePoint, std::function<void()>> messages_;
  std::set<RefId> pending_;  ///< whose creation has not arrived
  TimePoint now_;
  int passed_ = 0;
  int replied_ = 0;
  int repeated_ = 0;
};

TEST(RefsSimulation, NoReferenceEndsEarlyAndNoneLeaks) {
  int passed = 0, replied = 0, repeated = 0;
  for (const int workers : {2, 3, 8, 64}) {
    for (uint32_t seed = 0; seed < 25; ++seed) {
      SCOPED_TRACE(testing::Message() << workers << " workers, seed " << seed);
      Simulation simulation(workers, seed);
      simulation.run(3000);
      simulation.end();
      passed += simulation.passed();
      replied += simulation.replied();
      repeated += simulation.repeated();
      if (testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GT(passed, 20'000);
  EXPECT_GT(replied, 2'000);
  EXPECT_GT(repeated, 1'000) << "releases that arrived again";
}

}  // namespace
}  // namespace muster::rpc
