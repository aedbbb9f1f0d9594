#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "muster/launch/rendezvous/rendezvous.h"
#include "muster/store/ttl_lock.h"

namespace muster {

/// Runs a job's JobRendezvous on the root, on its own thread: takes the events of nodes from the inbox, and writes
/// events and assignments to the store.
class Coordinator {
 public:
  /// What the next root needs to continue the job. Borrowed.
  struct Failover {
    /// Holds the generation and the number of restarts. Null: the job's own store does.
    Store* persisted_state = nullptr;
    const TtlLock* claim = nullptr;  ///< to be the root; null if no other node can become the root
  };
  /// `store`: a handle to the job's store that only this object uses. `failed`: called on the coordinator's thread when
  /// the store or the claim was lost. The coordinator makes no more decisions then.
  static Result<std::unique_ptr<Coordinator>> start(std::unique_ptr<Store> store, const std::string& run_id,
                                                    RendezvousOptions options, Failover failover,
                                                    std::function<void(const Error&)> failed);
  /// Ends the thread. The nodes notice this when the store is gone.
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  /// Waits until the job is over or has moved, at least `expected` nodes know this, and no node needs the store. False
  /// at the deadline. Thread-safe.
  bool await_all_left(int expected, const Deadline& deadline);
  /// True if the job is over after all events that are in the inbox now. False at the deadline. Thread-safe.
  bool await_over(const Deadline& deadline);

 private:
  Coordinator(std::unique_ptr<Store> store, const std::string& run_id, const RendezvousOptions& options,
              Failover failover, std::function<void(const Error&)> failed);
  void run();
  Result<> step();
  Result<> handle(ByteView bytes, TimePoint now);
  Result<> publish(const std::vector<JobEvent>& events);
  Result<> publish_start();
  Result<> publish_nodes();
  Result<> collect_garbage(int generation);
  Result<> delete_some();

  const std::unique_ptr<Store> store_;
  const JobKeys keys_;
  const Failover failover_;
  const std::function<void(const Error&)> failed_;
  JobRendezvous rendezvous_;
  int64_t event_count_ = 0;        // events written so far, also the number of the last event
  std::vector<Key> garbage_keys_;  // keys of old generations; deleted when the inbox is empty
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;  // guards departed_ and over_
  std::condition_variable changed_;
  int departed_ = -1;         // how many nodes have left; set when all have left
  std::optional<bool> over_;  // the answer to await_over()
  std::thread thread_;
};

}  // namespace muster
