#include "muster/rpc/peer_calls.h"

#include <fmt/format.h>

#include "muster/rpc/function_table.h"

namespace muster::rpc {

std::string OutgoingCall::to_string() const {
  return fmt::format("call of \"{}\" at worker \"{}\"", shown_name(function), to);
}

bool PeerCalls::add(CallPtr call) {
  if (waiting_.size() >= limits_.queued) return false;
  OutgoingCall& added = *call;
  added.waits = true;
  added.place = waiting_.insert(waiting_.end(), std::move(call));
  return true;
}

CallPtr PeerCalls::next() {
  if (waiting_.empty() || in_flight_.size() >= limits_.in_flight) return nullptr;
  const uint64_t bytes = waiting_.front()->arguments.footprint();
  if (!in_flight_.empty() && bytes_ + bytes > limits_.bytes) return nullptr;
  CallPtr call = std::move(waiting_.front());
  waiting_.pop_front();
  call->waits = false;
  call->id = ++last_id_;
  bytes_ += bytes;
  in_flight_.emplace(call->id, InFlight{call, bytes, call->options.one_way});
  return call;
}

Result<CallPtr> PeerCalls::on_answer(uint64_t id, bool started) {
  const auto found = in_flight_.find(id);
  if (found == in_flight_.end()) {
    return fail(ErrorCode::kProtocol, fmt::format("an answer to request {}, which waits for none", id));
  }
  if (started && !found->second.one_way) {
    return fail(ErrorCode::kProtocol, fmt::format("the start of request {}, which waits for a result", id));
  }
  CallPtr call = std::move(found->second.call);
  bytes_ -= found->second.bytes;
  in_flight_.erase(found);
  return call;
}

void PeerCalls::abandon(OutgoingCall& call) {
  if (call.waits) {
    call.waits = false;
    waiting_.erase(call.place);
    return;
  }
  const auto found = in_flight_.find(call.id);
  if (found != in_flight_.end() && found->second.call.get() == &call) found->second.call = nullptr;
}

std::vector<CallPtr> PeerCalls::on_lost() {
  std::vector<CallPtr> calls;
  for (auto& [id, entry] : in_flight_) {
    if (entry.call) calls.push_back(std::move(entry.call));
  }
  in_flight_.clear();
  bytes_ = 0;
  return calls;
}

std::vector<CallPtr> PeerCalls::take_waiting() {
  std::vector<CallPtr> calls(waiting_.begin(), waiting_.end());
  waiting_.clear();
  for (const CallPtr& call : calls) call->waits = false;
  return calls;
}

}  // namespace muster::rpc
