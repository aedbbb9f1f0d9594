#include "muster/collective/schedule/rounds.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>

#include "muster/base/check.h"

namespace muster {
namespace {

using Memory = std::vector<SliceValue>;

bool in_place(Collective collective) { return !has_input_blocks(collective) && !has_output_blocks(collective); }

class Playback {
 public:
  Playback(const CollectiveSpec& problem, std::span<const Schedule> schedules)
      : problem_(problem), schedules_(schedules), ranks_(schedules.size()) {
    for (Rank rank = 0; rank < static_cast<Rank>(ranks_.size()); ++rank) prepare(rank);
  }

  Rounds run() {
    show(BufferKind::kInput);
    finish_local();
    while (left_ > 0) {
      const size_t before = left_;
      const int round = static_cast<int>(rounds_.held.size());
      start_sends(round);
      while (receive_once()) finish_local();
      finish_local();
      MUSTER_CHECK(left_ < before, "the schedules of all ranks do not fit together");
      show(BufferKind::kOutput);
    }
    return std::move(rounds_);
  }

 private:
  struct State {
    std::array<Memory, 3> memory;  // by BufferKind; if the call is in place, input is unused
    std::vector<bool> done;
  };

  size_t slice_of(size_t bytes) const { return bytes / problem_.element_bytes; }

  void prepare(Rank rank) {
    State& state = ranks_[rank];
    const auto size = static_cast<size_t>(problem_.size);
    const Collective collective = problem_.collective;
    const bool root = rank == problem_.root;
    const bool has_input = root || (collective != Collective::kBroadcast && collective != Collective::kScatter);
    Memory input(problem_.count * (has_input_blocks(collective) ? size : 1));
    for (size_t slice = 0; slice < input.size() && has_input; ++slice) input[slice] = {Term{slice, rank}};
    state.memory[1] =
        in_place(collective) ? input : Memory(problem_.count * (has_output_blocks(collective) ? size : 1));
    state.memory[0] = std::move(input);
    state.memory[2].resize(slice_of(schedules_[rank].scratch_bytes) + 1);
    state.done.resize(schedules_[rank].steps.size());
    left_ += state.done.size();
  }

  std::span<SliceValue> slices(Rank rank, const Range& range) {
    const bool same = range.buffer == BufferKind::kInput && in_place(problem_.collective);
    Memory& memory = ranks_[rank].memory[same ? 1 : static_cast<size_t>(range.buffer)];
    // The byte of a barrier is not a slice.
    if (problem_.count == 0) return std::span(memory).first(0);
    return std::span(memory).subspan(slice_of(range.offset), slice_of(range.bytes));
  }

  bool ready(Rank rank, const Step& step) const {
    const auto& done = ranks_[rank].done;
    return (step.after == Step::kNone || done[step.after]) && (step.and_after == Step::kNone || done[step.and_after]);
  }

  void finish(Rank rank, size_t index) {
    ranks_[rank].done[index] = true;
    --left_;
  }

  /// Calls `body` for each step of each rank that can run: the step has not ended, its dependencies have ended, and no
  /// earlier step with the same peer and direction still waits.
  template <class Body>
  void each_ready(Body body) {
    for (Rank rank = 0; rank < static_cast<Rank>(ranks_.size()); ++rank) {
      std::map<std::pair<Rank, bool>, bool> blocked;
      for (size_t i = 0; i < schedules_[rank].steps.size(); ++i) {
        const Step& step = schedules_[rank].steps[i];
        if (ranks_[rank].done[i]) continue;
        bool& waits = blocked[{step.peer, step.kind == Step::Kind::kSend}];
        waits = (step.peer != kNoRank && waits) || !ready(rank, step) || !body(rank, i, step);
      }
    }
  }

  void start_sends(int round) {
    std::vector<std::pair<Rank, size_t>> started;
    each_ready([&](Rank rank, size_t index, const Step& step) {
      if (step.kind != Step::Kind::kSend) return false;
      const auto sent = slices(rank, step.from);
      auto& channel = channels_[{rank, step.peer}];
      channel.insert(channel.end(), sent.begin(), sent.end());
      arrived_[{rank, step.peer}] += step.from.bytes;
      auto& messages = rounds_.messages;
      if (messages.empty() || messages.back().round != round || messages.back().from != rank ||
          messages.back().to != step.peer) {
        messages.push_back({round, rank, step.peer, {}});
      }
      messages.back().slices.insert(messages.back().slices.end(), sent.begin(), sent.end());
      started.emplace_back(rank, index);
      return true;
    });
    // The sends end only now, so that a send that waits for another one is in a later round.
    for (const auto& [rank, index] : started) finish(rank, index);
  }

  bool receive_once() {
    const size_t before = left_;
    each_ready([&](Rank rank, size_t index, const Step& step) {
      if (step.kind != Step::Kind::kReceive && step.kind != Step::Kind::kReceiveReduce) return false;
      const Range& to = step.kind == Step::Kind::kReceive ? step.to : step.from;
      size_t& arrived = arrived_[{step.peer, rank}];
      if (arrived < to.bytes) return false;
      arrived -= to.bytes;
      auto& channel = channels_[{step.peer, rank}];
      for (SliceValue& slice : slices(rank, to)) {
        slice = std::move(channel.front());
        channel.pop_front();
      }
      if (step.kind == Step::Kind::kReceiveReduce) combine(rank, step);
      finish(rank, index);
      return true;
    });
    return left_ < before;
  }

  void finish_local() {
    for (size_t before = left_ + 1; left_ < before;) {
      before = left_;
      each_ready([&](Rank rank, size_t index, const Step& step) {
        if (step.kind == Step::Kind::kReduce) {
          combine(rank, step);
        } else if (step.kind == Step::Kind::kCopy) {
          std::ranges::copy(Memory(slices(rank, step.from).begin(), slices(rank, step.from).end()),
                            slices(rank, step.to).begin());
        } else {
          return false;
        }
        finish(rank, index);
        return true;
      });
    }
  }

  void combine(Rank rank, const Step& step) {
    const auto from = slices(rank, step.from), with = slices(rank, step.with), to = slices(rank, step.to);
    for (size_t i = 0; i < to.size(); ++i) {
      SliceValue sum = from[i];
      sum.insert(sum.end(), with[i].begin(), with[i].end());
      std::ranges::sort(sum);
      to[i] = std::move(sum);
    }
  }

  void show(BufferKind kind) {
    auto& held = rounds_.held.emplace_back();
    for (const State& state : ranks_) held.push_back(state.memory[static_cast<size_t>(kind)]);
  }

  const CollectiveSpec& problem_;
  const std::span<const Schedule> schedules_;
  std::vector<State> ranks_;
  std::map<std::pair<Rank, Rank>, std::deque<SliceValue>> channels_;
  std::map<std::pair<Rank, Rank>, size_t> arrived_;  // bytes sent and not received, including those of a barrier
  size_t left_ = 0;
  Rounds rounds_;
};

}  // namespace

Rounds play_rounds(const CollectiveSpec& problem, std::span<const Schedule> schedules) {
  return Playback(problem, schedules).run();
}

}  // namespace muster
