#pragma once

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "collective/trial.h"
#include "muster/base/random.h"
#include "muster/collective/schedule/dependency_graph.h"

namespace muster::test {

/// Runs a trial's schedules without links, as adversely as a network may: bytes leave the sender's memory only when the
/// receiver takes them, some at a time, and whatever can happen next happens in random order. So it finds deadlocks
/// (nothing is buffered) and steps that rely on an order nobody promised; and it watches that no step writes memory
/// that a send or receive still holds, or reads memory that a receive holds.
class Rendezvous {
 public:
  Rendezvous(Trial& trial, uint64_t seed);
  void start(Rank rank);
  void start_all();
  /// Until nothing can happen any more.
  void run();
  bool finished(Rank rank) const { return parties_[rank].unfinished == 0; }
  /// What is stuck, left over or wrong; empty when there is nothing.
  std::string fault() const;

 private:
  struct Hold {
    uint32_t step;
    const uint8_t* begin;
    const uint8_t* end;
    bool writes;
  };
  struct Party {
    DependencyGraph graph;
    size_t unfinished = 0;
    std::vector<Hold> holds;  // memory of sends and receives that have not ended
  };
  struct Transfer {
    Rank rank;
    uint32_t step;
    size_t done = 0;
  };
  struct Channel {
    std::deque<Transfer> sends, receives;
    std::deque<uint32_t> left;  // sends whose bytes are gone, which the sender does not know yet
    bool listed = false;
  };
  struct Action {
    Channel* channel;     // null: a local step
    Rank rank = kNoRank;  // of a local step, or of the sender who learns that its next send has ended
    uint32_t step = 0;
  };

  const Step& step(Rank rank, uint32_t index) const { return trial_.schedule(rank).steps[index]; }
  auto begin_when_ready(Rank rank) {
    return [this, rank](uint32_t step) { begin(rank, step); };
  }
  void begin(Rank rank, uint32_t index);
  void end(Rank rank, uint32_t index);
  void offer(Rank from, Rank to, Transfer transfer, bool send);
  void carry(Channel& channel);
  void run_local(Rank rank, uint32_t index);
  void combine(Rank rank, uint32_t index);
  void hold(Rank rank, uint32_t index, const Range& range, bool writes);
  void touch(Rank rank, uint32_t index, const Range& range, bool writes);
  uint8_t* memory(Rank rank, const Range& range);

  Trial& trial_;
  Random random_;
  std::vector<Party> parties_;
  std::unordered_map<uint64_t, Channel> channels_;
  std::vector<Action> actions_;
  std::string conflict_;
};

}  // namespace muster::test
