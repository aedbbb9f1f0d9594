#pragma once

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "collective/trial.h"
#include "muster/base/random.h"
#include "muster/collective/schedule/dependency_graph.h"

namespace muster::test {

/// Runs a trial's schedules without links, in the worst way that a network allows. Bytes leave the sender's memory only
/// when the receiver takes them, a few at a time, and possible actions run in random order. Nothing is buffered, so it
/// finds deadlocks, and steps that rely on an order that is not guaranteed. It also checks that no step writes memory
/// that a send or receive still uses, or reads memory that a receive still uses.
class AdversarialRunner {
 public:
  AdversarialRunner(Trial& trial, uint64_t seed);
  void start(Rank rank);
  void start_all();
  /// Runs until no action is possible any more.
  void run();
  bool finished(Rank rank) const { return progress_[rank].unfinished == 0; }
  /// Describes steps that are stuck, data that is left over, or a wrong result. Empty if there is no fault.
  std::string fault() const;

 private:
  struct MemoryUse {
    uint32_t step;
    const uint8_t* begin;
    const uint8_t* end;
    bool writes;
  };
  struct RankProgress {
    DependencyGraph graph;
    size_t unfinished = 0;
    std::vector<MemoryUse> uses;  // memory that unfinished sends and receives use
  };
  struct Transfer {
    Rank rank;
    uint32_t step;
    size_t done = 0;
  };
  struct Channel {
    std::deque<Transfer> sends, receives;
    std::deque<uint32_t> left;  // sends whose bytes were taken, but whose completion the sender does not know yet
    bool listed = false;
  };
  struct Action {
    Channel* channel;     // null for a local step
    Rank rank = kNoRank;  // the rank of a local step, or the sender that learns that its next send has ended
    uint32_t step = 0;
  };

  const Step& step(Rank rank, uint32_t index) const { return trial_.schedule(rank).steps[index]; }
  auto begin_when_ready(Rank rank) {
    return [this, rank](uint32_t step) { begin(rank, step); };
  }
  void begin(Rank rank, uint32_t index);
  void end(Rank rank, uint32_t index);
  void post(Rank from, Rank to, Transfer transfer, bool send);
  void transfer_bytes(Channel& channel);
  void run_local(Rank rank, uint32_t index);
  void combine(Rank rank, uint32_t index);
  void hold(Rank rank, uint32_t index, const Range& range, bool writes);
  void touch(Rank rank, uint32_t index, const Range& range, bool writes);
  uint8_t* memory(Rank rank, const Range& range);

  Trial& trial_;
  Random random_;
  std::vector<RankProgress> progress_;
  std::unordered_map<uint64_t, Channel> channels_;
  std::vector<Action> actions_;
  std::string conflict_;
};

}  // namespace muster::test
