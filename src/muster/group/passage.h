#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "muster/collective/execution.h"
#include "muster/collective/operation.h"
#include "muster/collective/schedule.h"

namespace muster {

/// Operations over links, one at a time: plans them, keeps the plans of the calls that repeat, and owns the scratch
/// memory. Driven by the links' loop.
class Passage {
 public:
  /// The schedule of an operation between `size` ranks of which this one is `self`. Valid until the next call.
  Result<const Schedule*> plan(const Operation& operation, Rank self, int size);
  /// The ranks that the last planned schedule exchanges bytes with.
  const std::vector<Rank>& peers() const { return plans_[last_].peers; }

  /// Starts what was planned last. `links[r]` is the link to rank r; they, and the operation's memory, must live until
  /// it is over, or until the links are closed.
  void begin(const Operation& operation, std::span<Link* const> links);
  /// Set once it is over.
  const std::optional<Result<>>& outcome() const { return outcome_; }
  /// The ranks, as their links name them, that it waits for.
  std::vector<Rank> waiting_for() const;

 private:
  struct Plan {
    Problem problem;
    Schedule schedule;
    std::vector<Rank> peers;
    uint64_t used = 0;  ///< when, counted in calls
  };
  Plan& room();

  std::vector<Plan> plans_;
  size_t last_ = 0;
  uint64_t calls_ = 0;
  Bytes scratch_;
  std::span<Link* const> links_;
  std::optional<Execution> execution_;
  std::optional<Result<>> outcome_;
};

}  // namespace muster
