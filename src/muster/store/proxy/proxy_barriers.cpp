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
  const auto full = held_.find(key);
  if (full != held_.end() && full->second.group.weight > UINT32_MAX - request.weight) send(full);
  const TimePoint until = now + hold_ * patience(request.number);
  const auto held = held_.try_emplace(key, Held{{key.first, key.second}, until}).first;
  Group& group = held->second.group;
  group.members.push_back({caller, request.weight});
  group.weight += request.weight;
  if (max_hold_.count() == 0) send(held);
}

void Barriers::flush(TimePoint now) {
  for (auto held = held_.begin(); held != held_.end();) {
    const bool waits = held->second.until > now && held->second.group.weight < expected_;
    held = waits ? std::next(held) : send(held);
  }
}

std::optional<TimePoint> Barriers::next_wake() const {
  std::optional<TimePoint> next;
  for (const auto& [key, held] : held_) {
    if (!next || held.until < *next) next = held.until;
  }
  return next;
}

Barriers::HeldGroups::iterator Barriers::send(HeldGroups::iterator held) {
  Group& group = held->second.group;
  ++rounds_[group.key].requests;
  const RequestId id = out_.send(
      Part::kBarrier,
      {.operation = StoreOperation::kBarrier, .keys = {group.key}, .number = group.count, .weight = group.weight});
  for (const Member& member : group.members) where_[member.caller] = id;
  sent_.emplace(id, std::move(group));
  return held_.erase(held);
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
  for (auto member = group.members.begin(); member != group.members.end() && count > 0;) {
    const uint32_t taken = std::min(count, member->weight - member->withdrawing);
    count -= taken;
    if (taken > 0) out_.answer(member->caller, {.number = taken});
    member = shrink(group, member, taken);
  }
  if (group.members.empty()) sent_.erase(id);
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
  for (auto it = where_.lower_bound({client, 0}); it != where_.end() && it->first.client == client;) {
    const Caller caller = (it++)->first;  // a copy, as cancel() may erase the entry
    cancel(caller);
  }
}

void Barriers::withdraw(const Request& request, ClientId client) {
  const Caller caller{client, static_cast<RequestId>(request.number)};
  const auto where = where_.find(caller);
  if (where == where_.end()) return out_.answer({client, request.id}, {});
  take_back(caller, where->second, request.weight, request.id);
}

void Barriers::take_back(const Caller& caller, RequestId id, uint32_t weight, std::optional<RequestId> answer_to) {
  Withdrawal withdrawal{id, caller, weight, answer_to};
  if (id == 0) return report(withdrawal, take_from_held(caller, weight));
  Group& group = sent_.at(id);
  const auto member = group.find(caller);
  withdrawal.weight = std::min(weight, member->weight - member->withdrawing);
  if (withdrawal.weight == 0) return answer_to ? report(withdrawal, 0) : void();
  member->withdrawing += withdrawal.weight;
  const RequestId sent = out_.send(Part::kBarrier, {.operation = StoreOperation::kWithdraw,
                                                    .keys = {group.key},
                                                    .number = static_cast<int64_t>(id),
                                                    .weight = withdrawal.weight});
  withdrawals_.emplace(sent, withdrawal);
}

uint32_t Barriers::take_from_held(const Caller& caller, uint32_t weight) {
  for (auto held = held_.begin(); held != held_.end(); ++held) {
    Group& group = held->second.group;
    const auto member = group.find(caller);
    if (member == group.members.end()) continue;
    const uint32_t taken = std::min(weight, member->weight);
    rounds_[group.key].arrived -= taken;
    shrink(group, member, taken);
    if (group.members.empty()) held_.erase(held);
    return taken;
  }
  return 0;
}

// Handles the answer to a withdrawal: `count` arrivals were taken back. The server had released the other arrivals
// before.
void Barriers::taken_back(const Withdrawal& withdrawal, uint32_t count) {
  if (const auto sent = sent_.find(withdrawal.group); sent != sent_.end()) {
    Group& group = sent->second;
    if (const auto member = group.find(withdrawal.caller); member != group.members.end()) {
      member->withdrawing -= withdrawal.weight;
      shrink(group, member, withdrawal.weight);
      if (count < withdrawal.weight) out_.answer(withdrawal.caller, {.number = withdrawal.weight - count});
    }
    if (group.members.empty()) sent_.erase(sent);
  }
  report(withdrawal, count);
}

void Barriers::report(const Withdrawal& withdrawal, uint32_t count) {
  if (withdrawal.answer_to) {
    return out_.answer({withdrawal.caller.client, *withdrawal.answer_to}, {.number = count});
  }
  if (count > 0) out_.abort(withdrawal.caller);
}

// Removes arrivals of the member, and the member itself with its last arrival. Returns the next member.
Barriers::Members::iterator Barriers::shrink(Group& group, Members::iterator member, uint32_t weight) {
  member->weight -= weight;
  group.weight -= weight;
  if (member->weight > 0) return member + 1;
  where_.erase(member->caller);
  const auto next = group.members.erase(member);
  if (group.members.empty()) rounds_.erase(group.key);
  return next;
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
