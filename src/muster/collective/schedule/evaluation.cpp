#include "muster/collective/schedule/evaluation.h"

#include <algorithm>
#include <deque>
#include <queue>
#include <unordered_map>

#include "muster/base/check.h"
#include "muster/collective/schedule/dependency_graph.h"

namespace muster {
namespace {

class Evaluation {
 public:
  Evaluation(std::span<const Schedule> schedules, const CostModel& costs) : schedules_(schedules), costs_(costs) {
    for (const Schedule& schedule : schedules) {
      ranks_.push_back({.graph = DependencyGraph(schedule.steps)});
      total_ += schedule.steps.size();
    }
  }

  double run();

 private:
  struct Event {
    enum Kind { kReady, kEnded, kArrived };
    double time;
    uint64_t number;  // orders the events of one time
    Kind kind;
    Rank rank;
    uint32_t step;
    bool operator<(const Event& other) const {
      return time != other.time ? time > other.time : number > other.number;  // the earliest event is on top
    }
  };
  struct RankState {
    DependencyGraph graph;
    double busy_until = 0;
  };
  struct Channel {
    size_t arrived = 0;             // bytes that no receive has taken
    std::deque<uint32_t> receives;  // in order
  };

  auto add_ready(Rank rank) {
    return [this, rank](uint32_t step) { push(now_, Event::kReady, rank, step); };
  }
  const std::vector<Step>& steps(Rank rank) const { return schedules_[rank].steps; }
  Channel& channel(Rank from, Rank to) {
    return channels_[static_cast<uint64_t>(from) << 32 | static_cast<uint32_t>(to)];
  }
  void push(double time, Event::Kind kind, Rank rank, uint32_t step) {
    events_.push({time, number_++, kind, rank, step});
  }

  void handle(const Event& event) {
    const Step& step = steps(event.rank)[event.step];
    DependencyGraph& graph = ranks_[event.rank].graph;
    switch (event.kind) {
      case Event::kReady:
        graph.on_started(event.step, add_ready(event.rank));
        if (step.receives()) {
          channel(step.peer, event.rank).receives.push_back(event.step);
          take(step.peer, event.rank);
        } else {
          work(event.rank, event.step);
        }
        break;
      case Event::kEnded:
        ++ended_;
        if (step.kind == Step::Kind::kSend) push(now_ + costs_.link.latency, Event::kArrived, event.rank, event.step);
        graph.on_ended(event.step, add_ready(event.rank));
        break;
      case Event::kArrived:
        channel(event.rank, step.peer).arrived += step.from.bytes;
        take(event.rank, step.peer);
        break;
    }
  }

  /// Gives the arrived bytes to the receives, in order. A receive that has all its bytes becomes work of the rank.
  void take(Rank from, Rank to) {
    Channel& lane = channel(from, to);
    while (!lane.receives.empty()) {
      const uint32_t first = lane.receives.front();
      const size_t bytes = steps(to)[first].on_link().bytes;
      if (lane.arrived < bytes) return;
      lane.arrived -= bytes;
      lane.receives.pop_front();
      work(to, first);
    }
  }

  void work(Rank rank, uint32_t index) {
    const Step& step = steps(rank)[index];
    const auto bytes = static_cast<double>(std::max(step.from.bytes, step.to.bytes));
    double seconds = 0;
    if (step.peer != kNoRank) seconds += costs_.link.overhead + bytes / costs_.link.bytes_per_second;
    const bool combines = step.kind != Step::Kind::kSend && step.kind != Step::Kind::kReceive;
    if (combines) seconds += bytes / costs_.reduce_bytes_per_second;
    double& busy_until = ranks_[rank].busy_until;
    busy_until = std::max(busy_until, now_) + seconds * std::max(1.0, costs_.load);
    push(busy_until, Event::kEnded, rank, index);
  }

  const std::span<const Schedule> schedules_;
  const CostModel& costs_;
  std::vector<RankState> ranks_;
  std::unordered_map<uint64_t, Channel> channels_;
  std::priority_queue<Event> events_;
  double now_ = 0;
  uint64_t number_ = 0;
  size_t ended_ = 0, total_ = 0;
};

double Evaluation::run() {
  for (Rank rank = 0; rank < static_cast<Rank>(ranks_.size()); ++rank) ranks_[rank].graph.begin_run(add_ready(rank));
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    now_ = event.time;
    handle(event);
  }
  MUSTER_CHECK(ended_ == total_, "the schedules of all ranks do not fit together");
  return now_;
}

}  // namespace

double evaluate(std::span<const Schedule> schedules, const CostModel& costs) {
  return Evaluation(schedules, costs).run();
}

}  // namespace muster
