// Keys under "muster/group/<name>/<generation>/monitored/<number>":
//
//   here/<rank>  set by each rank but 0 when it arrives
//   verdict      set by rank 0: empty if all ranks arrived, else the missing ranks
//
// Rank 0 deletes keys that no rank reads any more. The key contains the number of the barrier, so that a late rank does
// not count as arrived in a later barrier.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "muster/group/group.h"

namespace muster {
namespace {

/// The other ranks wait this much longer than rank 0, so that they can read its verdict.
constexpr Duration kVerdictTime = std::chrono::seconds(2);

int64_t milliseconds(Duration time) { return std::chrono::duration_cast<std::chrono::milliseconds>(time).count(); }

struct MonitoredBarrier {
  const GroupSpec& self;
  const std::unique_ptr<Store> store;  ///< the keys of all barriers of the group
  const uint64_t number;
  const Duration timeout;

  Result<> lead(bool name_all) const {
    std::vector<Key> keys;
    for (Rank rank = 1; rank < self.size; ++rank) keys.push_back(here(rank));
    const auto come = store->wait(keys, Deadline::after(timeout));
    if (!come && come.error().code != ErrorCode::kTimeout) return come;
    std::vector<Rank> missing;
    for (Rank rank = 1; !come && rank < self.size && (name_all || missing.empty()); ++rank) {
      MUSTER_ASSIGN(const bool came, store->check({here(rank)}, Deadline::after(kVerdictTime)));
      if (!came) missing.push_back(rank);
    }
    std::string verdict;
    if (!missing.empty()) {
      verdict = fmt::format("Rank{} {} failed to pass monitoredBarrier in {} ms", missing.size() > 1 ? "s" : "",
                            fmt::join(missing, ", "), milliseconds(timeout));
    }
    MUSTER_TRY(store->set(key("verdict", number), as_bytes(verdict), Deadline::after(kVerdictTime)));
    if (!missing.empty()) return fail(ErrorCode::kTimeout, verdict, missing.front());
    for (const Key& arrival : keys) MUSTER_TRY(store->delete_key(arrival, Deadline::after(kVerdictTime)));
    // All ranks have arrived at this barrier, so all have read the previous verdict.
    if (number > 1) MUSTER_TRY(store->delete_key(key("verdict", number - 1), Deadline::after(kVerdictTime)));
    return {};
  }

  Result<> follow() const {
    const Deadline deadline = Deadline::after(timeout + kVerdictTime);
    MUSTER_TRY(store->set(here(self.rank), {}, deadline));
    const auto verdict = store->get(key("verdict", number), deadline);
    if (verdict && verdict->empty()) return {};
    const std::string why = verdict ? to_string(ByteView(*verdict)) : verdict.error().message;
    return fail(ErrorCode::kTimeout,
                fmt::format("Rank {} successfully reached monitoredBarrier, but received errors while waiting for "
                            "send/recv from rank 0: {}",
                            self.rank, why),
                0);
  }

  static Key key(const char* what, uint64_t number) { return fmt::format("{}/{}", number, what); }
  Key here(Rank rank) const { return fmt::format("{}/here/{}", number, rank); }
};

}  // namespace

Result<> Group::monitored_barrier(Store& store, Duration timeout, bool name_all) {
  const GroupSpec& self = membership();
  const uint64_t number = ++monitored_;
  if (self.size == 1) return {};
  const std::string prefix = fmt::format("muster/group/{}/{}/monitored", self.name, self.generation);
  const MonitoredBarrier barrier{self, prefix_store(prefix, store), number, timeout};
  if (self.rank != 0) return barrier.follow();
  if (timeout <= Duration::zero()) {
    return fail(ErrorCode::kTimeout,
                fmt::format("Rank 0 timed out in monitoredBarrier after {} ms", milliseconds(timeout)), 0);
  }
  return barrier.lead(name_all);
}

}  // namespace muster
