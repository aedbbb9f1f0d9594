#include "collective/adversarial_runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "muster/base/check.h"
#include "muster/kernels/reduce.h"

namespace muster::test {

AdversarialRunner::AdversarialRunner(Trial& trial, uint64_t seed) : trial_(trial), random_(seed) {
  for (Rank rank = 0; rank < trial.size(); ++rank) {
    const std::vector<Step>& steps = trial.schedule(rank).steps;
    progress_.push_back({DependencyGraph(steps), steps.size(), {}});
  }
}

void AdversarialRunner::start(Rank rank) { progress_[rank].graph.begin_run(begin_when_ready(rank)); }

void AdversarialRunner::start_all() {
  for (Rank rank = 0; rank < trial_.size(); ++rank) start(rank);
}

void AdversarialRunner::begin(Rank rank, uint32_t index) {
  const Step& what = step(rank, index);
  switch (what.kind) {
    case Step::Kind::kSend:
      hold(rank, index, what.from, false);
      post(rank, what.peer, {rank, index}, true);
      break;
    case Step::Kind::kReceive:
    case Step::Kind::kReceiveReduce:
      hold(rank, index, what.on_link(), true);
      post(what.peer, rank, {rank, index}, false);
      break;
    case Step::Kind::kCopy:
    case Step::Kind::kReduce:
      actions_.push_back({nullptr, rank, index});
      break;
  }
  progress_[rank].graph.on_started(index, begin_when_ready(rank));
}

void AdversarialRunner::end(Rank rank, uint32_t index) {
  --progress_[rank].unfinished;
  std::erase_if(progress_[rank].uses, [&](const MemoryUse& hold) { return hold.step == index; });
  progress_[rank].graph.on_ended(index, begin_when_ready(rank));
}

void AdversarialRunner::post(Rank from, Rank to, Transfer transfer, bool send) {
  Channel& channel = channels_[static_cast<uint64_t>(from) << 32 | static_cast<uint32_t>(to)];
  (send ? channel.sends : channel.receives).push_back(transfer);
  if (channel.listed || channel.sends.empty() || channel.receives.empty()) return;
  channel.listed = true;
  actions_.push_back({&channel});
}

void AdversarialRunner::run() {
  while (!actions_.empty()) {
    std::swap(actions_[random_.below(actions_.size())], actions_.back());
    const Action action = actions_.back();
    actions_.pop_back();
    if (action.channel != nullptr && action.rank == kNoRank) {
      transfer_bytes(*action.channel);
      continue;
    }
    if (action.channel != nullptr) {
      const uint32_t sent = action.channel->left.front();
      action.channel->left.pop_front();
      end(action.rank, sent);
      continue;
    }
    run_local(action.rank, action.step);
    end(action.rank, action.step);
  }
}

void AdversarialRunner::run_local(Rank rank, uint32_t index) {
  const Step& what = step(rank, index);
  if (what.kind == Step::Kind::kReduce) combine(rank, index);
  if (what.kind != Step::Kind::kCopy) return;
  touch(rank, index, what.from, false);
  uint8_t* const to = memory(rank, what.to);
  if (to == memory(rank, what.from)) return;
  touch(rank, index, what.to, true);
  std::memcpy(to, memory(rank, what.from), what.from.bytes);
}

void AdversarialRunner::transfer_bytes(Channel& channel) {
  const Transfer out = channel.sends.front(), in = channel.receives.front();
  const Step& send = step(out.rank, out.step);
  const Step& receive = step(in.rank, in.step);
  const Range& to = receive.on_link();
  const size_t most = std::min(send.from.bytes - out.done, to.bytes - in.done);
  const size_t bytes = random_.chance(0.5) ? most : random_.below(most) + 1;
  std::memcpy(memory(in.rank, to) + in.done, memory(out.rank, send.from) + out.done, bytes);
  channel.sends.front().done += bytes;
  channel.receives.front().done += bytes;
  const bool sent = out.done + bytes == send.from.bytes, received = in.done + bytes == to.bytes;
  if (sent) channel.sends.pop_front();
  if (received) channel.receives.pop_front();
  channel.listed = !channel.sends.empty() && !channel.receives.empty();
  if (channel.listed) actions_.push_back({&channel});
  if (received && receive.kind == Step::Kind::kReceiveReduce) combine(in.rank, in.step);
  if (received) end(in.rank, in.step);
  if (!sent) return;
  channel.left.push_back(out.step);
  actions_.push_back({&channel, out.rank});  // the sender learns of the completion some time later
}

void AdversarialRunner::hold(Rank rank, uint32_t index, const Range& range, bool writes) {
  touch(rank, index, range, writes);
  const uint8_t* const begin = memory(rank, range);
  progress_[rank].uses.push_back({index, begin, begin + range.bytes, writes});
}

void AdversarialRunner::touch(Rank rank, uint32_t index, const Range& range, bool writes) {
  const uint8_t* const begin = memory(rank, range);
  for (const MemoryUse& other : progress_[rank].uses) {
    const bool overlap = begin < other.end && other.begin < begin + range.bytes;
    if (!overlap || other.step == index || !(writes || other.writes) || !conflict_.empty()) continue;
    conflict_ = fmt::format("{}: at rank {} step {} touches memory of step {}, which has not ended:\n{}", trial_.name(),
                            rank, index, other.step, to_string(trial_.schedule(rank)));
  }
}

void AdversarialRunner::combine(Rank rank, uint32_t index) {
  const Step& what = step(rank, index);
  touch(rank, index, what.from, false);
  touch(rank, index, what.with, false);
  touch(rank, index, what.to, true);
  const Dtype dtype = trial_.dtype();
  reduce_two(memory(rank, what.to), memory(rank, what.first_operand()), memory(rank, what.second_operand()),
             what.to.bytes / size_of(dtype), dtype, ReduceOp::kSum);
}

uint8_t* AdversarialRunner::memory(Rank rank, const Range& range) {
  const MutableByteView memory = trial_.memory(rank, range.buffer);
  MUSTER_CHECK(range.bytes > 0 && range.offset + range.bytes <= memory.size(),
               fmt::format("{}: rank {} has a range of {} bytes at {} of {}", trial_.name(), rank, range.bytes,
                           range.offset, memory.size()));
  return memory.data() + range.offset;
}

std::string AdversarialRunner::fault() const {
  if (!conflict_.empty()) return conflict_;
  for (Rank rank = 0; rank < trial_.size(); ++rank) {
    if (progress_[rank].unfinished == 0) continue;
    return fmt::format("{}: rank {} is stuck with {} steps left:\n{}", trial_.name(), rank, progress_[rank].unfinished,
                       to_string(trial_.schedule(rank)));
  }
  for (const auto& [peers, channel] : channels_) {
    if (!channel.sends.empty() || !channel.receives.empty()) return trial_.name() + ": bytes are left over";
  }
  return trial_.fault();
}

}  // namespace muster::test
