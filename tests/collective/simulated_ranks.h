#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "collective/trial.h"
#include "sim/sim_world.h"

namespace muster::test {

/// All ranks of a trial in a simulated world, each with its links and its schedule. A rank that fails closes all its
/// links with its first error, as a group does.
class SimulatedRanks {
 public:
  SimulatedRanks(Trial& trial, sim::World& world);
  ~SimulatedRanks();

  void start(Rank rank);
  /// Starts each rank at a random time within `spread`.
  void start_all(Duration spread, uint64_t seed);
  void crash(Rank rank);
  /// Runs until every rank that did not crash has finished.
  Result<> run();

  bool finished(Rank rank) const { return results_[rank].has_value(); }
  const Result<>& result(Rank rank) const { return *results_[rank]; }
  bool crashed(Rank rank) const { return crashed_[rank]; }
  Link& link(Rank from, Rank to) { return *links_[from].at(to); }

 private:
  void link_up();
  void report(Rank rank, Result<> result);
  void abort(Rank rank, const Error& why);

  Trial& trial_;
  sim::World& world_;
  std::vector<std::map<Rank, std::unique_ptr<Link>>> links_;
  std::vector<PreparedSchedule> prepared_;
  std::vector<std::vector<Link*>> tables_;  // by rank: its links, indexed by peer, for the schedules
  std::vector<std::optional<Result<>>> results_;
  std::vector<bool> crashed_, aborted_;
  int unfinished_;
};

}  // namespace muster::test
