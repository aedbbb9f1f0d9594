#include "muster/collective/schedule/evaluation.h"

#include <algorithm>
#include <deque>
#include <map>
#include <queue>
#include <unordered_map>

#include "muster/base/check.h"

namespace muster {
namespace {

class Evaluation {
 public:
  Evaluation(std::span<const Schedule> schedules, const Network& network)
      : schedules_(schedules), network_(network), ranks_(schedules.size()) {
    for (Rank rank = 0; rank < static_cast<Rank>(schedules.size()); ++rank) connect(rank);
  }

  double run() {
    for (Rank rank = 0; rank < static_cast<Rank>(ranks_.size()); ++rank) {
      for (uint32_t i = 0; i < steps(rank).size(); ++i) {
        if (ranks_[rank].awaited[i] == 0) push(0, Event::kReady, rank, i);
      }
    }
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      now_ = event.time;
      handle(event);
    }
    MUSTER_CHECK(ended_ == total_, "the schedules of all ranks do not fit together");
    return now_;
  }

 private:
  struct Event {
    enum Kind { kReady, kEnded, kArrived };
    double time;
    uint64_t number;  // those of one time in the order in which they were found
    Kind kind;
    Rank rank;
    uint32_t step;
    bool operator<(const Event& other) const {
      return time != other.time ? time > other.time : number > other.number;  // the first is on top
    }
  };
  struct State {
    double busy_until = 0;
    std::vector<uint8_t> awaited;             // by step: how many things hold it back
    std::vector<std::vector<uint32_t>> next;  // by step: those that wait for its end
    std::vector<uint32_t> next_in_lane;       // those that wait for its start
  };
  struct Channel {
    size_t arrived = 0;             // bytes that nobody took
    std::deque<uint32_t> receives;  // in order
  };

  const std::vector<Step>& steps(Rank rank) const { return schedules_[rank].steps; }
  Channel& channel(Rank from, Rank to) {
    return channels_[static_cast<uint64_t>(from) << 32 | static_cast<uint32_t>(to)];
  }
  void push(double time, Event::Kind kind, Rank rank, uint32_t step) {
    events_.push({time, number_++, kind, rank, step});
  }

  void connect(Rank rank) {
    State& state = ranks_[rank];
    const size_t count = steps(rank).size();
    total_ += count;
    state.awaited.assign(count, 0);
    state.next.resize(count);
    state.next_in_lane.assign(count, Step::kNone);
    std::map<std::pair<Rank, bool>, uint32_t> lanes;
    for (uint32_t i = 0; i < count; ++i) {
      const Step& step = steps(rank)[i];
      for (const uint32_t other : {step.after, step.and_after}) {
        if (other == Step::kNone) continue;
        state.next[other].push_back(i);
        ++state.awaited[i];
      }
      if (step.peer == kNoRank) continue;
      const auto [lane, first] = lanes.try_emplace({step.peer, step.kind == Step::Kind::kSend}, i);
      if (first) continue;
      state.next_in_lane[lane->second] = i;
      ++state.awaited[i];
      lane->second = i;
    }
  }

  void release_dependency(Rank rank, uint32_t step) {
    if (--ranks_[rank].awaited[step] == 0) push(now_, Event::kReady, rank, step);
  }

  void handle(const Event& event) {
    const Step& step = steps(event.rank)[event.step];
    State& state = ranks_[event.rank];
    switch (event.kind) {
      case Event::kReady:
        if (state.next_in_lane[event.step] != Step::kNone)
          release_dependency(event.rank, state.next_in_lane[event.step]);
        if (step.kind == Step::Kind::kReceive || step.kind == Step::Kind::kReceiveReduce) {
          channel(step.peer, event.rank).receives.push_back(event.step);
          take(step.peer, event.rank);
        } else {
          work(event.rank, event.step);
        }
        break;
      case Event::kEnded:
        ++ended_;
        if (step.kind == Step::Kind::kSend) push(now_ + network_.latency, Event::kArrived, event.rank, event.step);
        for (const uint32_t next : state.next[event.step]) release_dependency(event.rank, next);
        break;
      case Event::kArrived:
        channel(event.rank, step.peer).arrived += step.from.bytes;
        take(event.rank, step.peer);
        break;
    }
  }

  /// Gives the receives what has come, in order: one that has all its bytes is the rank's work.
  void take(Rank from, Rank to) {
    Channel& lane = channel(from, to);
    while (!lane.receives.empty()) {
      const uint32_t first = lane.receives.front();
      const Step& step = steps(to)[first];
      const size_t bytes = step.kind == Step::Kind::kReceive ? step.to.bytes : step.from.bytes;
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
    if (step.peer != kNoRank) seconds += network_.overhead + bytes / network_.bytes_per_second;
    const bool combines = step.kind != Step::Kind::kSend && step.kind != Step::Kind::kReceive;
    if (combines) seconds += bytes / network_.reduce_bytes_per_second;
    double& busy_until = ranks_[rank].busy_until;
    busy_until = std::max(busy_until, now_) + seconds * std::max(1.0, network_.load);
    push(busy_until, Event::kEnded, rank, index);
  }

  const std::span<const Schedule> schedules_;
  const Network& network_;
  std::vector<State> ranks_;
  std::unordered_map<uint64_t, Channel> channels_;
  std::priority_queue<Event> events_;
  double now_ = 0;
  uint64_t number_ = 0;
  size_t ended_ = 0, total_ = 0;
};

}  // namespace

double evaluate(std::span<const Schedule> schedules, const Network& network) {
  return Evaluation(schedules, network).run();
}

}  // namespace muster
