#include "muster/store/proxy/proxy_parts.h"

namespace muster::proxy {
namespace {

constexpr size_t kMaxMembers = 1 << 16;

// Adds `amount` to `sum` if one add request may replace both: they have the same sign, and the sum does not overflow.
bool merge(int64_t& sum, int64_t amount) {
  int64_t merged = 0;
  if ((sum < 0) != (amount < 0) || __builtin_add_overflow(sum, amount, &merged)) return false;
  sum = merged;
  return true;
}

}  // namespace

void Adds::submit(Request request, ClientId client) {
  const Key& key = request.keys[0];
  dirty_.insert(key);
  ++pending_;
  std::deque<Group>& groups = lanes_[key].groups;
  const bool joins = !groups.empty() && !groups.back().closed && groups.back().members.size() < kMaxMembers &&
                     merge(groups.back().amount, request.number);
  if (!joins) groups.push_back({.amount = request.number});
  groups.back().members.push_back({{client, request.id}, request.number});
}

void Adds::flush() {
  for (const Key& key : dirty_) {
    Lane& lane = lanes_.at(key);
    if (lane.sent) continue;
    Group& group = lane.groups.front();
    group.closed = true;
    lane.sent = true;
    sent_[out_.send(Part::kAdd, {.operation = StoreOperation::kAdd, .keys = {key}, .number = group.amount})] = key;
  }
  dirty_.clear();
}

void Adds::receive(Reply reply) {
  const auto key = sent_.extract(reply.id);
  if (key.empty()) return;
  const auto lane = lanes_.find(key.mapped());
  const Group group = std::move(lane->second.groups.front());
  lane->second.groups.pop_front();
  lane->second.sent = false;
  const bool refused = !reply.status && reply.status.error().code == ErrorCode::kInvalidArgument;
  if (refused && group.members.size() > 1) {
    for (auto member = group.members.rbegin(); member != group.members.rend(); ++member) {
      lane->second.groups.push_front({member->amount, true, {*member}});
    }
  } else {
    answer(group, reply);
  }
  if (lane->second.groups.empty()) {
    dirty_.erase(key.mapped());
    lanes_.erase(lane);
  } else {
    dirty_.insert(key.mapped());
  }
}

// Each client gets the sum that it would have got if the server had carried out the adds one after the other.
void Adds::answer(const Group& group, const Reply& reply) {
  pending_ -= group.members.size();
  int64_t sum = reply.number - group.amount;
  for (const Member& member : group.members) {
    sum += member.amount;
    out_.answer(member.caller, {.status = reply.status, .number = sum});
  }
}

void Adds::fail(const Error& why) {
  for (const auto& [key, lane] : lanes_) {
    for (const Group& group : lane.groups) {
      for (const Member& member : group.members) out_.refuse(member.caller, why);
    }
  }
  lanes_.clear();
  dirty_.clear();
  sent_.clear();
  pending_ = 0;
}

}  // namespace muster::proxy
