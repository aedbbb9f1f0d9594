#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/error.h"
#include "muster/rpc/refs/ref_id.h"

namespace muster::rpc {

/// The value behind a reference, at its owner. What it is, only the layer above knows.
class RefValue {
 public:
  virtual ~RefValue() = default;
};

/// The references that this worker owns, and who holds them. A reference lives until no worker holds it. Not
/// thread-safe. It knows neither links nor threads, so the simulator runs it, too.
///
/// The protocol. A worker that passes a reference to another one first grants it: it asks the owner to count one more
/// grant for the receiver. Only then it sends the reference, and it holds its own until that message has been handled.
/// A receiver counts the grants that it gets, and releases that many when it drops the reference. The counts add up in
/// any order, so releases and grants may overtake each other.
///
/// A worker that died, or a message that was lost, would keep a count forever. Therefore each holder also renews what
/// it holds, and the owner removes a holder that has not done so for a lease. A grant whose reference is still on its
/// way cannot be renewed by its receiver: it lives as long as the worker that granted it renews its own.
///
/// The worker that sends a reply does not learn when it is handled, and drops its reference soon. If the receiver is
/// the owner, a grant for the owner itself holds the reference until claim() finds it in the reply, for a lease at
/// most.
class OwnedRefs {
 public:
  explicit OwnedRefs(std::string self, Duration lease) : self_(std::move(self)), lease_(lease) {}

  /// The first holder is the worker that created the reference.
  void create(const RefId& id, const std::string& holder, TimePoint now);
  /// At the arrival of a reply that was granted to this worker: now this worker holds the reference. False if nobody
  /// holds it any more.
  bool claim(const RefId& id, TimePoint now);
  /// Counts a grant for `holder`, which `by` makes. `by_creator`: the reference may be granted before it is created,
  /// because the creator's messages may overtake each other. kNotFound if nobody holds it any more.
  Result<> grant(const RefId& id, const std::string& holder, const std::string& by, bool by_creator, TimePoint now);
  /// Returns the value if this was the last holder.
  std::shared_ptr<RefValue> release(const RefId& id, const std::string& holder, uint64_t grants, TimePoint now);
  /// `grants`: how many the holder has. It may have been removed, if this worker was not reachable for long.
  void renew(const RefId& id, const std::string& holder, uint64_t grants, TimePoint now);
  /// Removes the holders whose leases have ended. Returns the values that nobody holds any more.
  std::vector<std::shared_ptr<RefValue>> expire(TimePoint now);

  bool contains(const RefId& id) const { return refs_.contains(id); }
  size_t size() const { return refs_.size(); }
  /// Null if it has no value yet.
  std::shared_ptr<RefValue> value(const RefId& id) const;
  /// Ignored if nobody holds the reference any more.
  void set_value(const RefId& id, std::shared_ptr<RefValue> value);

 private:
  struct Holder {
    uint64_t grants = 0;  ///< it holds the reference while there are any
    /// Grants that a lease has ended. Their release may still arrive, and must not take grants that came later.
    uint64_t lapsed = 0;
    TimePoint expires;
    std::set<std::string> granters;  ///< who may have a message to it on its way: until they release their own
  };
  struct Ref {
    bool is_held() const;
    std::map<std::string, Holder> holders;
    std::shared_ptr<RefValue> value;
  };
  bool is_protected(const Ref& ref, const Holder& holder, TimePoint now) const;

  std::string self_;  ///< this worker holds without a lease
  Duration lease_;
  std::unordered_map<RefId, Ref> refs_;
};

}  // namespace muster::rpc
