#include "muster/torch/hooks_sequencer.h"

#include <condition_variable>
#include <optional>
#include <thread>

namespace muster {

struct HookSequencer::Queue {
  struct Entry {
    Step step;
    std::optional<Result<>> result;
  };

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Entry>> entries;
  bool running = false, closed = false;

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return closed || (!entries.empty() && entries.front()->result.has_value()); });
      if (entries.empty()) return;  // closed
      const std::shared_ptr<Entry> entry = std::move(entries.front());
      entries.pop_front();
      const Result<> result =
          entry->result ? *entry->result : fail(ErrorCode::kAborted, "its communication hook ended");
      running = true;
      lock.unlock();
      entry->step(result);
      entry->step = nullptr;  // here and not where the work's callback goes
      lock.lock();
      running = false;
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

bool HookSequencer::busy() const {
  if (queue_ == nullptr) return false;
  const std::lock_guard lock(queue_->mutex);
  return queue_->running || !queue_->entries.empty();
}

void HookSequencer::then(const Work& work, Step step) {
  if (queue_ == nullptr) {
    queue_ = std::make_shared<Queue>();
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
