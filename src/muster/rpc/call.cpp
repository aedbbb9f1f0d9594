#include "muster/rpc/call.h"

#include "muster/rpc/agent.h"

namespace muster::rpc {

std::string CallError::to_string() const {
  std::string text = error.to_string();
  if (!traceback.empty()) text += "\n" + traceback;
  return text;
}

std::vector<std::function<void()>> CallState::finish(CallResult value) {
  const std::lock_guard lock(mutex_);
  if (done()) return {};
  result_.emplace(std::move(value));
  done_.store(true, std::memory_order_release);
  return std::exchange(callbacks_, {});
}

bool CallState::add_callback(std::function<void()> callback) {
  const std::lock_guard lock(mutex_);
  if (done()) return false;
  callbacks_.push_back(std::move(callback));
  return true;
}

const CallResult& Future::wait() const {
  state_->agent->wait(*state_, Deadline::never());
  return state_->result();
}

bool Future::wait_until(const Deadline& deadline) const {
  state_->agent->wait(*state_, deadline);
  return done();
}

// The callback must not hold the state, which holds the callback.
void Future::then(std::function<void(const CallResult&)> callback) const {
  const auto call = [state = state_.get(), callback = std::move(callback)] { callback(state->result()); };
  if (!state_->add_callback(call)) call();
}

void Future::cancel() const { state_->agent->cancel(*state_); }

}  // namespace muster::rpc
