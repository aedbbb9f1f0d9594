#include "muster/group/queue/hook_queue.h"

#include <utility>

namespace muster {

std::shared_ptr<const CompletionHook> HookQueue::set(CompletionHook hook) {
  return std::exchange(hook_, hook ? std::make_shared<const CompletionHook>(std::move(hook)) : nullptr);
}

HookCall HookQueue::begin() const {
  HookCall call{hook_, {}, {}, {}};
  call.stamp(call.submitted);
  return call;
}

void HookQueue::complete(HookCall&& call, const Call& operation, const Result<>& result) {
  if (!call.hook && size() == 0) {
    completed_ = operation.sequence;
  } else {
    pending_.push_back({std::move(call), operation, result});
  }
}

void HookQueue::run(std::unique_lock<std::mutex>& lock, std::condition_variable& changed) {
  if (running_) return;
  running_ = true;
  while (pending()) {
    Pending next = std::move(pending_.front());
    pending_.pop_front();
    lock.unlock();
    HookCall& call = next.call;
    if (call.hook) (*call.hook)(Finished{next.operation, call.submitted, call.started, call.ended, next.result});
    call.hook.reset();
    lock.lock();
    completed_ = next.operation.sequence;
    changed.notify_all();
  }
  running_ = false;
}

}  // namespace muster
