// The number of the barrier's current round is the value of one key. Each caller writes an arrival key of its own and
// counts the arrivals of the round, so callers do not conflict. The caller that completes the count increments the
// round number, which releases all callers of the round.
//
// A caller that times out removes its arrival and writes the round's key again with the same number, unless the round
// has ended. A round ends only if its key was not written since the count, so a withdrawn arrival cannot complete it. A
// caller whose arrival exceeds the count removes it and waits for the next round.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "muster/store/etcd/etcd_space.h"
#include "muster/store/external_store.h"

namespace muster {
namespace {

using etcd::Json;

// The longest wait between two checks. Each check also calls EtcdSpace::lease(), which keeps the arrival's lease alive.
constexpr Duration kBarrierCheckInterval = 10s;

class Arrival {
 public:
  Arrival(EtcdSpace& space, const Key& key, int64_t count, const Deadline& deadline)
      : space_(space), key_(key), folder_(space.barrier(key)), count_(count), deadline_(deadline) {}

  Result<> run() {
    MUSTER_TRY(read_round());
    while (true) {
      MUSTER_ASSIGN(const bool arrived, arrive());
      if (arrived) return wait_for_release();
      // The round has all its arrivals. The caller that completed it ends it.
      if (deadline_.passed()) return fail(ErrorCode::kTimeout, "the deadline has passed");
      MUSTER_TRY(watch());
      MUSTER_TRY(read_round());
    }
  }

 private:
  struct Round {
    int64_t number = 0;
    int64_t changed = 0;   // the revision of the last change of the round's key
    int64_t revision = 0;  // the revision of the answer that was read last
  };

  std::string round_key() const { return folder_ + "round"; }
  std::string round_folder() const { return fmt::format("{}a/{:016x}/", folder_, round_.number); }
  std::string count_folder() const { return fmt::format("{}{:016x}/", round_folder(), count_); }
  std::string arrival() const { return count_folder() + id_; }
  Json round_unchanged() const { return etcd::unchanged(round_key(), round_.changed); }
  Json put_round(int64_t number) const { return etcd::put(round_key(), as_bytes(std::to_string(number))); }

  Result<Json> transact(std::vector<Json> compare, std::vector<Json> success, std::vector<Json> failure = {}) const {
    return space_.transact(std::move(compare), std::move(success), std::move(failure), with_grace(deadline_));
  }

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
    return space_.client()->watch({{round_key()}}, round_.revision,
                                  deadline_.or_sooner(deadline_.clock().now() + kBarrierCheckInterval));
  }

  // Writes the arrival, and ends the round if this arrival completes the count. False if the round already had all
  // arrivals.
  Result<bool> arrive() {
    while (true) {
      MUSTER_ASSIGN(const int64_t lease, space_.lease(with_grace(deadline_)));
      const EtcdRange all = keys_below(round_folder()), mine = keys_below(count_folder());
      MUSTER_ASSIGN(const Json answer,
                    transact({round_unchanged(), etcd::empty({all.key, mine.key}), etcd::empty({mine.end, all.end})},
                             {etcd::put(arrival(), {}, lease), etcd::range(mine, {{"count_only", true}})},
                             {etcd::range({round_key()}), etcd::range(all, {{"keys_only", true}, {"limit", 1}})}));
      if (etcd::succeeded(answer)) {
        round_.revision = etcd::revision(answer);
        const int64_t arrived = etcd::number(etcd::response(answer, 1, "response_range"), "count");
        if (arrived == count_) MUSTER_TRY(move_on());
        if (arrived <= count_) return true;
        MUSTER_TRY(transact({}, {etcd::remove({arrival()})}));
        return false;
      }
      const int64_t before = round_.changed;
      set_round(etcd::response(answer, 0, "response_range"), etcd::revision(answer));
      if (round_.changed == before) return mismatch(etcd::response(answer, 1, "response_range"));
      if (deadline_.passed()) return fail(ErrorCode::kTimeout, "the deadline has passed");
    }
  }

  // If the condition fails, another caller has ended the round, or a caller has timed out. That is no error, because
  // wait_for_release() reads the round again.
  Result<> move_on() {
    MUSTER_TRY(transact({round_unchanged()}, {put_round(round_.number + 1), etcd::remove(keys_below(round_folder()))}));
    return {};
  }

  // Returns once the round has ended. Withdraws the arrival at the deadline.
  Result<> wait_for_release() {
    const Round mine = round_;
    while (true) {
      const bool last = deadline_.passed();
      MUSTER_ASSIGN(const Json answer, transact({}, {etcd::range({round_key()}),
                                                     etcd::range(keys_below(count_folder()), {{"count_only", true}})}));
      set_round(etcd::response(answer, 0, "response_range"), etcd::revision(answer));
      if (round_.number != mine.number) return {};
      if (etcd::number(etcd::response(answer, 1, "response_range"), "count") >= count_) {
        MUSTER_TRY(move_on());  // the completing caller died, or a timed-out caller wrote the key
      } else if (!last) {
        MUSTER_TRY(space_.lease(with_grace(deadline_)));
        MUSTER_TRY(watch());
      } else {
        MUSTER_ASSIGN(const Json withdrawn,
                      transact({round_unchanged()}, {etcd::remove({arrival()}), put_round(round_.number)}));
        if (etcd::succeeded(withdrawn)) return fail(ErrorCode::kTimeout, "the deadline has passed");
      }
    }
  }

  tl::unexpected<Error> mismatch(const Json& found) const {
    const std::string other = etcd::key_of(found).key;
    const std::string_view digits = std::string_view(other).substr(std::min(round_folder().size(), other.size()));
    int64_t count = 0;
    std::from_chars(digits.data(), digits.data() + std::min<size_t>(16, digits.size()), count, 16);
    return barrier_mismatch(key_, count_, etcd::number(found, "count"), count);
  }

  EtcdSpace& space_;
  const Key& key_;
  const std::string folder_;
  const int64_t count_;
  const Deadline deadline_;
  const std::string id_ = random_token();
  Round round_;
};

}  // namespace

Result<> etcd_barrier(EtcdSpace& space, const Key& key, int64_t count, const Deadline& deadline) {
  return Arrival(space, key, count, deadline).run();
}

}  // namespace muster
