#include "muster/torch/hooks/hooks_sequencer.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace muster {

struct HookSequencer::Queue {
  struct Entry {
    Step step;
    std::optional<Result<>> result;
  };

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Entry>> entries;
  bool closed = false;

  void run() {
    std::unique_lock lock(mutex);
    std::vector<std::shared_ptr<Entry>> cut_off;
    while (true) {
      changed.wait(lock, [this] { return closed || (!entries.empty() && entries.front()->result.has_value()); });
      if (entries.empty()) break;  // closed
      const std::shared_ptr<Entry> entry = std::move(entries.front());
      entries.pop_front();
      const bool ended = entry->result.has_value();
      const Result<> result = ended ? *entry->result : fail(ErrorCode::kAborted, "its communication hook ended");
      if (!ended) cut_off.push_back(entry);
      lock.unlock();
      entry->step(result);
      // Destroyed here, because the work's callback may be destroyed on another thread.
      if (ended) entry->step = nullptr;
      lock.lock();
    }
    for (const auto& entry : cut_off) {  // a running operation still uses the memory that its step holds
      changed.wait(lock, [&entry] { return entry->result.has_value(); });
      lock.unlock();
      entry->step = nullptr;
      lock.lock();
    }
  }
};

HookSequencer::~HookSequencer() {
  if (queue_ == nullptr) return;
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->closed = true;
  }
  queue_->changed.notify_all();
}

void HookSequencer::then(const Work& work, Step step) {
  if (queue_ == nullptr) {
    queue_ = std::make_shared<Queue>();
    // tidy: allow(detach) the thread that destroys it may hold a lock that its last step needs
    std::thread([queue = queue_] { queue->run(); }).detach();
  }
  auto entry = std::make_shared<Queue::Entry>();
  entry->step = std::move(step);
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->entries.push_back(entry);
  }
  work.on_done([queue = queue_, entry](const Result<>& result) {
    {
      const std::lock_guard lock(queue->mutex);
      entry->result = result;
    }
    queue->changed.notify_all();
  });
}

}  // namespace muster
