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
  enum class Load : uint8_t { kNone, kInTime, kOverdue };  ///< kOverdue: one has not ended by its deadline
  /// Why the operations in flight will not end, if so. There must be an error if one is overdue. Called again and
  /// again.
  using Check = std::function<Result<>(Load load)>;
  /// Called with the error of the check. Must end the kernels.
  using Failed = std::function<void(const Error& why)>;

  /// start() must come next.
  InFlight(Check check, Failed failed);
  void start();
  ~InFlight() override;

  Work add(Entry entry, uint64_t sequence);
  /// Fails all operations, also later ones. First it calls end_kernels() and waits for the kernels, because they use
  /// the memory. An operation whose kernel ends meanwhile has failed, too. All errors are that of the first call.
  void fail(const Error& why, const std::function<void()>& end_kernels);
  /// The error of the first fail().
  Result<> status() const;
  bool wait_until_empty(const Deadline& deadline);
  /// Ends the thread, and waits for those that finish operations now. Not from a callback of a Work.
  void stop();

  // WorkDriver
  void drive(Work::State& state, const Deadline& deadline) override;

 private:
  void run();
  /// Finishes the operations that have ended. The error is that of the device.
  Result<> poll();
  Result<> take_ended(std::deque<Entry>& ended);
  /// poll(), and fails the operations if there is a reason to.
  void look();
  /// Finishes operations that were taken out of entries_. The caller has incremented finishing_.
  void finish_all(std::deque<Entry>& entries, const Result<>& result);
  Load load() const;

  const Check check_;
  const Failed failed_;
  mutable std::mutex mutex_;          ///< guards all fields below
  std::condition_variable wake_;      ///< of the thread, when it is idle or has to end
  std::condition_variable finished_;  ///< an operation was finished
  std::deque<Entry> entries_;
  std::optional<Error> failure_;  ///< the first argument of fail()
  int finishing_ = 0;             ///< threads in finish_all()
  bool looking_ = false;          ///< a thread calls check_, and then failed_
  bool idle_ = false;             ///< the thread has seen no operation for a while
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace muster::nccl
