#include "muster/rpc/name_look_up.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace muster::rpc {
namespace {

/// The longest wait for an answer of the store.
constexpr Duration kAnswerTime = 2s;
/// The pause before a name is looked up again doubles from the first to the second value.
constexpr Duration kMinPause = 10ms, kMaxPause = 200ms;

}  // namespace

NameLookUp::NameLookUp(LoopDriver& driver, Directory& directory, Found found)
    : driver_(driver), directory_(directory), found_(std::move(found)) {}

Result<> NameLookUp::add(const std::string& name) {
  names_.emplace(TimePoint{}, Name{name, kMinPause});  // before names that were looked up already
  changed_.notify_all();
  if (thread_.joinable()) return {};
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return fail(ErrorCode::kResourceExhausted, std::string("cannot start a thread: ") + error.what());
  }
  return {};
}

void NameLookUp::end() {
  ended_ = true;
  changed_.notify_all();
}

void NameLookUp::join() {
  if (thread_.joinable()) thread_.join();
}

void NameLookUp::run() {
  LoopDriver::Lock lock = driver_.lock();
  while (!ended_) {
    if (names_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const Duration pause = names_.begin()->first - steady_clock().now();
    if (pause > Duration::zero()) {
      changed_.wait_for(lock, pause);
      continue;
    }
    Name next = std::move(names_.begin()->second);
    names_.erase(names_.begin());
    lock.unlock();
    const auto worker = directory_.find(next.name, Deadline::after(kAnswerTime));
    lock.lock();
    if (found_(next.name, worker)) {
      const TimePoint again = steady_clock().now() + next.pause;
      next.pause = std::min(2 * next.pause, kMaxPause);
      names_.emplace(again, std::move(next));
    }
    driver_.provide_progress();
    driver_.wake();  // a dial and the callbacks need the thread that drives the loop
  }
}

}  // namespace muster::rpc
