#include "muster/rpc/peer_calls.h"

#include <fmt/format.h>

#include <utility>

#include "muster/rpc/function_table.h"

namespace muster::rpc {

std::string OutgoingCall::to_string() const {
  const std::string request = id != 0 ? fmt::format(" (request {})", id) : "";
  return fmt::format("call of \"{}\" at worker \"{}\"{}", shown_name(function), to, request);
}

bool PeerCalls::add(CallPtr call) {
  if (waiting_.size() >= max_queued_) return false;
  OutgoingCall& added = *call;
  added.waits = true;
  added.place = waiting_.insert(waiting_.end(), std::move(call));
  return true;
}

CallPtr PeerCalls::next() {
  if (waiting_.empty()) return nullptr;
  const uint64_t bytes = waiting_.front()->arguments.footprint();
  if (!window_.has_room(bytes)) return nullptr;
  CallPtr call = std::move(waiting_.front());
  waiting_.pop_front();
  call->waits = false;
  call->id = ++last_id_;
  window_.add(bytes);
  in_flight_.emplace(call->id, InFlight{call, bytes, call->options.one_way});
  return call;
}

Result<CallPtr> PeerCalls::on_answer(uint64_t id, bool started) {
  const auto found = in_flight_.find(id);
  if (found == in_flight_.end()) {
    return fail(ErrorCode::kProtocol, fmt::format("an answer to request {}, which waits for none", id));
  }
  InFlight& request = found->second;
  if (started && !request.one_way) {
    if (std::exchange(request.started, true)) {
      return fail(ErrorCode::kProtocol, fmt::format("the start of request {} for a second time", id));
    }
    window_.start(request.bytes);
    return CallPtr();
  }
  CallPtr call = std::move(request.call);
  window_.end(request.bytes, request.started);
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
  window_ = CallWindow(window_.limits());
  return calls;
}

std::vector<CallPtr> PeerCalls::take_waiting() {
  std::vector<CallPtr> calls(waiting_.begin(), waiting_.end());
  waiting_.clear();
  for (const CallPtr& call : calls) call->waits = false;
  return calls;
}

}  // namespace muster::rpc
