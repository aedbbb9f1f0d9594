#include "muster/group/work_state.h"

#include <utility>

namespace muster {
namespace {

/// Lets the waiting thread drive the operation, if the operation has a driver.
void drive(Work::State& state, const Deadline& deadline) {
  std::unique_lock lock(state.mutex);
  const std::shared_ptr<WorkDriver> driver = state.driver;
  lock.unlock();
  if (driver) driver->drive(state, deadline);
}

}  // namespace

std::vector<std::function<void(const Result<>&)>> Work::State::finish(Result<> outcome) {
  std::unique_lock lock(mutex);
  const std::shared_ptr<WorkDriver> done = std::move(driver);  // destroyed without the lock
  result = std::move(outcome);
  finished = true;
  auto to_call = std::exchange(callbacks, {});
  lock.unlock();
  changed.notify_all();
  return to_call;
}

void Work::take_failure(Result<>&& result) {
  state_ = std::make_shared<State>();
  (void)state_->finish(std::move(result));  // there are no callbacks yet
}

bool Work::done() const {
  if (!state_) return true;
  const std::lock_guard lock(state_->mutex);
  return state_->finished;
}

Result<> Work::wait(const Deadline& deadline) const {
  if (!state_) return {};
  drive(*state_, deadline);
  std::unique_lock lock(state_->mutex);
  const auto finished = [this] { return state_->finished; };
  if (!state_->changed.wait_for(lock, deadline.left(), finished)) {
    return fail(ErrorCode::kTimeout, "the operation is still pending");
  }
  return state_->result;
}

Result<> Work::wait() const {
  if (!state_) return {};
  drive(*state_, Deadline::never());
  std::unique_lock lock(state_->mutex);
  // This wait ends, because the group finishes every operation at its deadline at the latest.
  state_->changed.wait(lock, [this] { return state_->finished; });
  return state_->result;
}

Result<> Work::result() const {
  if (!state_) return {};
  const std::lock_guard lock(state_->mutex);
  return state_->result;
}

Rank Work::source() const {
  if (!state_) return kNoRank;
  const std::lock_guard lock(state_->mutex);
  return state_->source;
}

void Work::on_done(std::function<void(const Result<>&)> callback) const {
  if (!state_) return callback({});
  std::unique_lock lock(state_->mutex);
  if (!state_->finished) return state_->callbacks.push_back(std::move(callback));
  lock.unlock();
  callback(state_->result);
}

}  // namespace muster
