#include "collective/simulated_ranks.h"

#include "muster/base/check.h"
#include "muster/base/random.h"

namespace muster::test {

SimulatedRanks::SimulatedRanks(Trial& trial, sim::World& world)
    : trial_(trial),
      world_(world),
      links_(trial.size()),
      tables_(trial.size()),
      results_(trial.size()),
      crashed_(trial.size()),
      aborted_(trial.size()),
      unfinished_(trial.size()) {
  link_up();
  for (Rank rank = 0; rank < trial.size(); ++rank) prepared_.emplace_back(trial.schedule(rank));
}

SimulatedRanks::~SimulatedRanks() {
  for (auto& links : links_) links.clear();  // ends pending operations while the schedules still exist
}

// The table of links ends at the highest peer. So thousands of ranks need little memory.
void SimulatedRanks::start(Rank rank) {
  auto& links = tables_[rank];
  links.assign(links_[rank].empty() ? 0 : links_[rank].rbegin()->first + 1, nullptr);
  for (auto& [peer, link] : links_[rank]) links[peer] = link.get();
  prepared_[rank].start(links, trial_.buffers(rank), trial_.scratch(rank),
                        [this, rank](Result<> result) { report(rank, std::move(result)); });
}

void SimulatedRanks::link_up() {
  for (Rank rank = 0; rank < trial_.size(); ++rank) {
    for (const Step& step : trial_.schedule(rank).steps) {
      if (step.peer == kNoRank || links_[rank].contains(step.peer)) continue;
      auto [here, there] = world_.connect(rank, step.peer);
      here->on_close([this, rank](const Error& why) { abort(rank, why); });
      there->on_close([this, peer = step.peer](const Error& why) { abort(peer, why); });
      links_[rank][step.peer] = std::move(here);
      links_[step.peer][rank] = std::move(there);
    }
  }
}

void SimulatedRanks::start_all(Duration spread, uint64_t seed) {
  Random random(seed);
  for (Rank rank = 0; rank < trial_.size(); ++rank) {
    const Duration wait(random.below(static_cast<uint64_t>(spread.count()) + 1));
    world_.at(world_.clock().now() + wait, [this, rank] {
      if (!crashed_[rank]) start(rank);
    });
  }
}

void SimulatedRanks::crash(Rank rank) {
  crashed_[rank] = true;
  if (!finished(rank)) --unfinished_;
  world_.crash(rank);
}

Result<> SimulatedRanks::run() {
  return world_.run_until([this] { return unfinished_ == 0; }, Deadline::after(std::chrono::hours(1), world_.clock()));
}

void SimulatedRanks::report(Rank rank, Result<> result) {
  MUSTER_CHECK(!finished(rank) && !crashed_[rank], "an execution reports once, and never from a dead rank");
  results_[rank] = result;
  --unfinished_;
  if (!result) abort(rank, result.error());
}

void SimulatedRanks::abort(Rank rank, const Error& why) {
  if (aborted_[rank] || crashed_[rank]) return;
  aborted_[rank] = true;
  for (auto& [peer, link] : links_[rank]) link->close(why);
}

}  // namespace muster::test
