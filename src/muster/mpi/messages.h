#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "muster/group/work_state.h"
#include "muster/mpi/world.h"

namespace muster::mpi {

/// The pending messages of a group over MPI. MPI makes progress only inside its functions, so a thread that waits for a
/// message tests all of them; threads of this object do so while none waits. Thread-safe.
///
/// MPI cannot take a send back: it may read the memory until the message is received. So a send that misses its
/// deadline ends the job. A receive can be canceled.
class Messages final : public WorkDriver, public std::enable_shared_from_this<Messages> {
 public:
  /// `comm`: of these messages alone.
  Messages(const World& world, Handle comm, int size);
  ~Messages() override;
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  Work send(BufferView data, Rank to, uint32_t tag, Duration timeout);
  /// `from` may be kAnyRank.
  Work receive(BufferView data, Rank from, uint32_t tag, Duration timeout);
  /// Ends pending receives and later messages with `why`. Pending sends must end within `time_for_sends`.
  void close(const Error& why, Duration time_for_sends);
  /// Waits until no message is pending and all callbacks have returned, and ends the threads. Must be called after
  /// close(), and not from a callback.
  void stop();

  void drive(Work::State& state, const Deadline& deadline) override;

 private:
  struct Message;
  using Callbacks = std::vector<std::function<void()>>;
  using Lock = std::unique_lock<std::mutex>;

  Result<> check_arguments(const Message& message) const;
  Result<> begin(const std::shared_ptr<Message>& message);
  Work submit(std::shared_ptr<Message> message);
  Callbacks test_all();
  bool test(Message& message, Callbacks& callbacks);
  bool expire(Message& message, Callbacks& callbacks);
  void end(Message& message, Result<> outcome, Callbacks& callbacks);
  Result<> outcome_of(Message& message, int code, const Status& status);
  Result<> start_thread();
  void run();

  const World& world_;
  const Library& mpi_;
  const Handle comm_;
  const int size_;
  int max_tag_ = 0;
  std::mutex mutex_;  ///< guards all fields below
  std::condition_variable changed_;
  std::list<std::shared_ptr<Message>> pending_;
  std::optional<Error> closed_;
  int waiting_ = 0;       ///< threads in drive() that test messages
  bool polling_ = false;  ///< a thread of this object tests messages
  bool stopping_ = false;
  int free_threads_ = 0;              ///< threads of this object that do not run callbacks
  std::vector<std::thread> threads_;  ///< the first message starts one; callbacks that take long start more
};

}  // namespace muster::mpi
