#include <algorithm>

#include "muster/store/proxy/proxy_parts.h"

namespace muster::proxy {
namespace {

// Multiplies the hold time. A barrier of many callers takes long anyway, and a longer hold gathers more arrivals.
int64_t patience(int64_t count) { return std::clamp<int64_t>(count / 1024, 1, 32); }

}  // namespace

void Barriers::submit(Request request, ClientId client, TimePoint now) {
  const Caller caller{client, request.id};
  if (!where_.emplace(caller, 0).second) {
    return out_.refuse(caller, Error{ErrorCode::kProtocol, "a barrier request of this number is already waiting"});
  }
  rounds_[request.keys[0]].arrived += request.weight;
  const HeldKey key{request.keys[0], request.number};
  auto held = held_.find(key);
  if (held != held_.end() && held->second.group.weight > UINT32_MAX - request.weight) {
    send(std::move(held->second.group));
    held_.erase(held);
    held = held_.end();
  }
  if (held == held_.end())
    held = held_.emplace(key, Held{{key.first, key.second, {}, 0}, now + hold_ * patience(request.number)}).first;
  Group& group = held->second.group;
  group.members.push_back({caller, request.weight});
  group.weight += request.weight;
  if (max_hold_.count() > 0) return;
  send(std::move(group));
  held_.erase(held);
}

void Barriers::flush(TimePoint now) {
  for (auto held = held_.begin(); held != held_.end();) {
    if (held->second.until > now && held->second.group.weight < expected_) {
      ++held;
      continue;
    }
    send(std::move(held->second.group));
    held = held_.erase(held);
  }
}

std::optional<TimePoint> Barriers::next_wake() const {
  std::optional<TimePoint> next;
  for (const auto& [key, held] : held_) {
    if (!next || held.until < *next) next = held.until;
  }
  return next;
}

void Barriers::send(Group group) {
  Request request{StoreOperation::kBarrier};
  request.keys.push_back(group.key);
  request.number = group.count;
  request.weight = group.weight;
  ++rounds_[group.key].requests;
  const RequestId id = out_.send(Part::kBarrier, std::move(request));
  for (const Member& member : group.members) where_[member.caller] = id;
  sent_.emplace(id, std::move(group));
}

void Barriers::receive(Reply reply) {
  if (const auto withdrawal = withdrawals_.extract(reply.id); !withdrawal.empty()) {
    // An error means that the server is lost. The server released none of these arrivals.
    return taken_back(withdrawal.mapped(),
                      reply.status ? static_cast<uint32_t>(reply.number) : withdrawal.mapped().weight);
  }
  const auto group = sent_.find(reply.id);
  if (group == sent_.end()) return;
  if (reply.status) {
    learn(group->second.key);
    return release(group->first, group->second, static_cast<uint32_t>(reply.number));
  }
  rounds_.erase(group->second.key);
  for (const Member& member : group->second.members) {
    out_.refuse(member.caller, reply.status.error());
    where_.erase(member.caller);
  }
  sent_.erase(group);
}

// Releases arrivals that are not being withdrawn, the oldest first. The rest of `count` belongs to arrivals that are
// being withdrawn: taken_back() answers them.
void Barriers::release(RequestId id, Group& group, uint32_t count) {
  for (size_t i = 0; i < group.members.size() && count > 0;) {
    Member& member = group.members[i];
    const uint32_t taken = std::min(count, member.weight - member.withdrawing);
    count -= taken;
    const bool last = taken == member.weight;
    if (taken > 0) {
      answer(member.caller, taken);
      group.weight -= taken;
      member.weight -= taken;
    }
    if (last) {
      where_.erase(member.caller);
      group.members.erase(group.members.begin() + static_cast<ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  if (group.members.empty()) sent_.erase(id);
}

void Barriers::answer(const Caller& caller, uint32_t count) {
  Reply reply;
  reply.number = count;
  out_.answer(caller, std::move(reply));
}

// Adapts the hold time. It grows if a round's arrivals left in several requests, and shrinks if the round had only one
// arrival from this node.
void Barriers::learn(const Key& key) {
  const auto round = rounds_.extract(key);
  if (round.empty()) return;
  const Duration shortest = max_hold_ / 16;
  expected_ = round.mapped().arrived;
  if (round.mapped().requests > 1) {
    hold_ = std::clamp(hold_ * 2, shortest, max_hold_);
  } else if (round.mapped().arrived == 1) {
    hold_ = hold_ / 2 < shortest ? Duration{0} : hold_ / 2;
  }
}

// ---- withdrawals

bool Barriers::cancel(const Caller& caller) {
  const auto where = where_.find(caller);
  if (where == where_.end()) return false;
  take_back(caller, where->second, UINT32_MAX, std::nullopt);
  return true;
}

void Barriers::drop(ClientId client) {
  std::vector<Caller> gone;
  for (auto it = where_.lower_bound({client, 0}); it != where_.end() && it->first.client == client; ++it) {
    gone.push_back(it->first);
  }
  for (const Caller& caller : gone) cancel(caller);
}

void Barriers::withdraw(const Request& request, ClientId client) {
  const Caller caller{client, static_cast<RequestId>(request.number)};
  const auto where = where_.find(caller);
  if (where == where_.end()) return answer({client, request.id}, 0);
  take_back(caller, where->second, request.weight, request.id);
}

void Barriers::take_back(const Caller& caller, RequestId id, uint32_t weight, std::optional<RequestId> answer_to) {
  Withdrawal withdrawal{id, caller, weight, answer_to};
  if (id == 0) return report(withdrawal, take_from_held(caller, weight));
  Group& group = sent_.at(id);
  const auto member = std::find_if(group.members.begin(), group.members.end(),
                                   [&](const Member& candidate) { return candidate.caller == caller; });
  withdrawal.weight = std::min(weight, member->weight - member->withdrawing);
  if (withdrawal.weight == 0) return answer_to ? report(withdrawal, 0) : void();
  member->withdrawing += withdrawal.weight;
  Request request{StoreOperation::kWithdraw};
  request.keys.push_back(group.key);
  request.number = static_cast<int64_t>(id);
  request.weight = withdrawal.weight;
  withdrawals_.emplace(out_.send(Part::kBarrier, std::move(request)), withdrawal);
}

uint32_t Barriers::take_from_held(const Caller& caller, uint32_t weight) {
  for (auto held = held_.begin(); held != held_.end(); ++held) {
    Group& group = held->second.group;
    for (size_t i = 0; i < group.members.size(); ++i) {
      if (group.members[i].caller != caller) continue;
      const uint32_t taken = std::min(weight, group.members[i].weight);
      rounds_[group.key].arrived -= taken;
      shrink(group, i, taken);
      if (group.members.empty()) held_.erase(held);
      return taken;
    }
  }
  return 0;
}

// Handles the answer to a withdrawal: `count` arrivals were taken back. The server had released the other arrivals
// before.
void Barriers::taken_back(const Withdrawal& withdrawal, uint32_t count) {
  const auto group = sent_.find(withdrawal.group);
  if (group != sent_.end()) {
    auto& members = group->second.members;
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i].caller != withdrawal.caller) continue;
      members[i].withdrawing -= withdrawal.weight;
      shrink(group->second, i, withdrawal.weight);
      if (count < withdrawal.weight) answer(withdrawal.caller, withdrawal.weight - count);
      break;
    }
    if (members.empty()) sent_.erase(group);
  }
  report(withdrawal, count);
}

void Barriers::report(const Withdrawal& withdrawal, uint32_t count) {
  if (withdrawal.answer_to) return answer({withdrawal.caller.client, *withdrawal.answer_to}, count);
  if (count > 0) out_.abort(withdrawal.caller);
}

void Barriers::shrink(Group& group, size_t index, uint32_t weight) {
  Member& member = group.members[index];
  member.weight -= weight;
  group.weight -= weight;
  if (member.weight > 0) return;
  where_.erase(member.caller);
  group.members.erase(group.members.begin() + static_cast<ptrdiff_t>(index));
  if (group.members.empty()) rounds_.erase(group.key);
}

void Barriers::fail(const Error& why) {
  for (const auto& [caller, id] : where_) out_.refuse(caller, why);
  for (const auto& [id, withdrawal] : withdrawals_) {
    if (withdrawal.answer_to) out_.refuse({withdrawal.caller.client, *withdrawal.answer_to}, why);
  }
  held_.clear();
  sent_.clear();
  where_.clear();
  rounds_.clear();
  withdrawals_.clear();
}

}  // namespace muster::proxy
