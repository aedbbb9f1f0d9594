#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "muster/group/work_state.h"
#include "muster/nccl/device.h"

namespace muster::nccl {

/// The operations that a stream has and that have not ended, in their order. Finishes each Work once the device has
/// passed its event. A thread looks for that, and so does each thread that waits for a Work. Thread-safe.
class InFlight final : public WorkDriver, public std::enable_shared_from_this<InFlight> {
 public:
  struct Entry {
    std::shared_ptr<Work::State> work;
    std::unique_ptr<Device::Event> event;
    TimePoint deadline;
    std::function<std::string()> describe;       ///< the call, for errors
    std::function<void(const Result<>&)> ended;  ///< before the Work is finished
    std::unique_ptr<Device::Event> begins;       ///< before the operation in its stream; may be null
    std::function<void()> begun;                 ///< called once the device has passed that event
  };
  /// Called when an operation has not ended by its deadline, or when `check` has an error. Must end the kernels.
  using Failed = std::function<void(const Error& why)>;

  /// `check`: why the operations in flight will not end, if so.
  InFlight(std::function<Result<>()> check, Failed failed);
  ~InFlight() override;

  Work add(Entry entry, uint64_t sequence);
  /// Finishes all operations with `why`, also later ones, after end_kernels() and the end of the kernels that it
  /// aborts: until then they may use the memory. An operation whose kernel ends in end_kernels() has failed, too.
  void fail(const Error& why, const std::function<void()>& end_kernels);
  /// From now on, failures are looked for also when no operation is in flight: a graph may run operations again.
  void watch();
  bool wait_until_empty(const Deadline& deadline);
  /// Ends the thread, and waits for those that finish operations now. Not from a callback of a Work.
  void stop();

  // WorkDriver
  void drive(Work::State& state, const Deadline& deadline) override;

 private:
  void start_thread();
  void run();
  void poll();
  /// Finishes operations that were taken out of entries_. The caller has incremented finishing_.
  void finish_all(std::deque<Entry>& entries, const std::optional<Error>& why);
  std::optional<Error> find_failure();

  const std::function<Result<>()> check_;
  const Failed failed_;
  std::mutex mutex_;  ///< guards all fields below
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  std::optional<Error> failure_;  ///< the first argument of fail()
  int finishing_ = 0;             ///< threads in finish_all()
  bool watching_ = false;         ///< watch() was called
  bool stopping_ = false;
  std::thread thread_;  ///< started with the first operation, or by watch()
};

}  // namespace muster::nccl
