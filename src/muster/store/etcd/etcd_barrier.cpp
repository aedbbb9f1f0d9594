// How callers meet, so that none is released early, none too late, and arrivals do not compete: each caller puts an
// arrival of its own and counts those of its round. The one whose arrival makes the count full moves the barrier to its
// next round, which releases all. A caller that gives up removes its arrival and touches the round, unless the round
// moved on meanwhile; who moves it on does so only if nobody touched it. An arrival beyond the count takes itself back
// and waits for the next round.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "muster/store/etcd/etcd_space.h"
#include "muster/store/request_store.h"

namespace muster {
namespace {

using etcd::Json;

// Also how often an arrival's lease is renewed.
constexpr Duration kBarrierLook = 10s;

class Arrival {
 public:
  Arrival(EtcdSpace& space, const Key& key, int64_t count, const Deadline& deadline)
      : space_(space), key_(key), folder_(space.barrier(key)), count_(count), deadline_(deadline) {}

  Result<> meet() {
    MUSTER_TRY(read_round());
    while (true) {
      MUSTER_ASSIGN(const bool arrived, arrive());
      if (arrived) return stay();
      // The round is full, and whoever filled it moves it on.
      if (deadline_.passed()) return fail(ErrorCode::kTimeout, "the deadline has passed");
      MUSTER_TRY(watch());
      MUSTER_TRY(read_round());
    }
  }

 private:
  struct Round {
    int64_t number = 0;
    int64_t changed = 0;   // the revision of its key's last change
    int64_t revision = 0;  // of the answer
  };

  std::string round_key() const { return folder_ + "round"; }
  std::string round_folder() const { return fmt::format("{}a/{:016x}/", folder_, round_.number); }
  std::string count_folder() const { return fmt::format("{}{:016x}/", round_folder(), count_); }
  std::string arrival() const { return count_folder() + id_; }
  Json untouched() const { return etcd::unchanged(round_key(), round_.changed); }
  Json put_round(int64_t number) const { return etcd::put(round_key(), as_bytes(std::to_string(number))); }

  void set_round(const Json& found, int64_t revision) {
    const EtcdKey key = etcd::key_of(found);
    round_ = {etcd::number({{"n", to_string(key.value)}}, "n"), key.changed, revision};
  }

  Result<> read_round() {
    MUSTER_ASSIGN(const Json answer, space_.range({round_key()}, Json::object(), with_grace(deadline_)));
    set_round(answer, etcd::revision(answer));
    return {};
  }

  Result<> watch() {
    return space_.client().watch({{round_key()}}, round_.revision,
                                 deadline_.or_sooner(deadline_.clock().now() + kBarrierLook));
  }

  // Puts the arrival, and moves the round on if it is the last. False if the round was full without it.
  Result<bool> arrive() {
    while (true) {
      MUSTER_ASSIGN(const int64_t lease, space_.lease(with_grace(deadline_)));
      const EtcdRange all = keys_below(round_folder()), mine = keys_below(count_folder());
      MUSTER_ASSIGN(
          const Json answer,
          space_.transact(
              etcd::transaction({untouched(), etcd::empty({all.key, mine.key}), etcd::empty({mine.end, all.end})},
                                {etcd::put(arrival(), {}, lease), etcd::range(mine, {{"count_only", true}})},
                                {etcd::range({round_key()}), etcd::range(all, {{"keys_only", true}, {"limit", 1}})}),
              with_grace(deadline_)));
      if (etcd::part(answer, "succeeded").is_boolean()) {
        round_.revision = etcd::revision(answer);
        const int64_t arrived = etcd::number(etcd::response(answer, 1, "response_range"), "count");
        if (arrived == count_) MUSTER_TRY(move_on());
        if (arrived <= count_) return true;
        MUSTER_TRY(space_.transact(etcd::transaction({}, {etcd::remove({arrival()})}), with_grace(deadline_)));
        return false;
      }
      const int64_t before = round_.changed;
      set_round(etcd::response(answer, 0, "response_range"), etcd::revision(answer));
      if (round_.changed == before) return tl::unexpected(mismatch(etcd::response(answer, 1, "response_range")));
      if (deadline_.passed()) return fail(ErrorCode::kTimeout, "the deadline has passed");
    }
  }

  // No error if somebody else was faster, or somebody gave up: stay() will see.
  Result<> move_on() {
    MUSTER_TRY(space_.transact(
        etcd::transaction({untouched()}, {put_round(round_.number + 1), etcd::remove(keys_below(round_folder()))}),
        with_grace(deadline_)));
    return {};
  }

  // Until the round has moved on; at the deadline the arrival is withdrawn.
  Result<> stay() {
    const Round mine = round_;
    while (true) {
      const bool last = deadline_.passed();
      MUSTER_ASSIGN(
          const Json answer,
          space_.transact(etcd::transaction({}, {etcd::range({round_key()}),
                                                 etcd::range(keys_below(count_folder()), {{"count_only", true}})}),
                          with_grace(deadline_)));
      set_round(etcd::response(answer, 0, "response_range"), etcd::revision(answer));
      if (round_.number != mine.number) return {};
      if (etcd::number(etcd::response(answer, 1, "response_range"), "count") >= count_) {
        MUSTER_TRY(move_on());  // who should have done it died, or was touched by one that gave up
      } else if (!last) {
        MUSTER_TRY(space_.lease(with_grace(deadline_)));
        MUSTER_TRY(watch());
      } else {
        MUSTER_ASSIGN(
            const Json withdrawn,
            space_.transact(etcd::transaction({untouched()}, {etcd::remove({arrival()}), put_round(round_.number)}),
                            with_grace(deadline_)));
        if (etcd::part(withdrawn, "succeeded").is_boolean()) {
          return fail(ErrorCode::kTimeout, "the deadline has passed");
        }
      }
    }
  }

  Error mismatch(const Json& found) const {
    const std::string other = etcd::key_of(found).key;
    const std::string_view digits = std::string_view(other).substr(std::min(round_folder().size(), other.size()));
    int64_t count = 0;
    std::from_chars(digits.data(), digits.data() + std::min<size_t>(16, digits.size()), count, 16);
    return {ErrorCode::kMismatch,
            fmt::format("barrier \"{}\" was given a count of {}, but {} caller(s) already wait there for {}", key_,
                        count_, etcd::number(found, "count"), count),
            kNoRank,
            {}};
  }

  EtcdSpace& space_;
  const Key& key_;
  const std::string folder_;
  const int64_t count_;
  const Deadline deadline_;
  const std::string id_ = new_id();
  Round round_;
};

}  // namespace

Result<> etcd_barrier(EtcdSpace& space, const Key& key, int64_t count, const Deadline& deadline) {
  if (count < 1) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("barrier \"{}\" was given a count of {}, it takes 1 or more", key, count));
  }
  return Arrival(space, key, count, deadline).meet();
}

}  // namespace muster
