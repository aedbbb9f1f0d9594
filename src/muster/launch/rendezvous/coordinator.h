#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "muster/launch/rendezvous/rendezvous.h"
#include "muster/store/ttl_lock.h"

namespace muster {

/// Runs the JobRendezvous of a job on its store, from a thread of its own, on the node that has the store: takes the
/// nodes' calls out of the inbox, and writes news and places.
class Coordinator {
 public:
  /// What another root goes by that takes this one's place. Borrowed.
  struct Failover {
    /// Where generation and restarts are kept, and read from before the first; null where nothing outlives this root.
    Store* persisted_state = nullptr;
    const TtlLock* claim = nullptr;  ///< to be the root; null where nobody else can be
  };
  /// `store`: a handle on the job's store, for this thread alone. `failed`: the store was lost, or the claim, and with
  /// it this root's say; called on the coordinator's thread.
  static Result<std::unique_ptr<Coordinator>> start(std::unique_ptr<Store> store, const std::string& run_id,
                                                    RendezvousOptions options, Failover succession,
                                                    std::function<void(const Error&)> failed);
  /// Decides nothing any more. The nodes find out when the store goes.
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  /// Until the job is over, at least `expected` nodes were told so, and none of them needs the store any longer. False
  /// at the deadline. Thread-safe.
  bool await_all_left(int expected, const Deadline& deadline);

 private:
  Coordinator(std::unique_ptr<Store> store, const std::string& run_id, const RendezvousOptions& options,
              Failover succession, std::function<void(const Error&)> failed);
  void run();
  Result<> turn();
  Result<> publish(const std::vector<JobEvent>& all);
  Result<> publish_start();
  Result<> publish_nodes();
  Result<> doom(int generation);
  Result<> delete_some();

  const std::unique_ptr<Store> store_;
  const JobKeys keys_;
  const Failover succession_;
  const std::function<void(const Error&)> failed_;
  JobRendezvous rendezvous_;
  int64_t news_ = 0;               // written so far
  std::vector<Key> garbage_keys_;  // of dead generations, to be deleted when there is nothing else to do
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  std::condition_variable turned_;
  int departed_ = -1;  // once all nodes have left: how many there were
  std::thread thread_;
};

}  // namespace muster
