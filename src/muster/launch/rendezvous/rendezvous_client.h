#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "muster/launch/rendezvous/rendezvous_messages.h"
#include "muster/store/store.h"

namespace muster {

/// A node's client of the job's root. One thread sends events. Another one sends heartbeats, because a slow write must
/// not delay them. A third one waits for the root's events. An object serves one root; the next root gets a new object.
/// The fields are three threads, the queue between them and the callers, and what all of them read.
class RendezvousClient {
 public:
  struct Options {
    std::string run_id;
    std::string node_id;                                    ///< unique for each agent
    Duration heartbeat_timeout = std::chrono::seconds(10);  ///< the root's; heartbeats are sent five times as often
  };
  /// Called on the client's threads.
  struct Events {
    /// `assignment`: set for a kStart if this node has a place in the generation.
    std::function<void(const JobEvent& event, std::optional<Assignment> assignment)> job_event;
    /// The root or its store is lost. No event follows.
    std::function<void(const Error& why)> lost;
  };

  static Result<std::unique_ptr<RendezvousClient>> start(std::unique_ptr<Store> store, Options options, Events events);
  /// Waits until the receiving thread has ended: after the outcome, a refusal, or the loss of the store. If none of
  /// these is certain, destroy the node's store server first.
  ~RendezvousClient();
  RendezvousClient(const RendezvousClient&) = delete;
  RendezvousClient& operator=(const RendezvousClient&) = delete;

  // These functions are thread-safe and do not wait. Messages are sent in order.

  /// Asks for a place in the job, the first time or after a kEvicted. The answer arrives as events.
  void join(NodeInfo node);
  void send(NodeEvent event);
  void publish(Key key, Bytes value);
  /// Waits until all messages have arrived. False at the deadline, or if the root is lost.
  bool flush(const Deadline& deadline);
  const JobKeys& keys() const { return keys_; }

 private:
  using Task = std::function<Result<>(Store&, const Deadline&)>;
  RendezvousClient(std::unique_ptr<Store> store, Options options, Events events);
  void enqueue(Task task);
  void send_all();
  void send_heartbeats();
  void receive();
  Result<bool> receive_one(int64_t number);
  void on_lost(const Error& why);

  const std::unique_ptr<Store> store_;
  const Options options_;
  const Events events_;
  const JobKeys keys_;
  int64_t first_event_ = 1;  // set before the threads start
  std::mutex mutex_;         // guards tasks_, sending_, ending_ and lost_
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  // sending_: the sender has taken a task from tasks_, and it is not done.
  bool sending_ = false, ending_ = false, lost_ = false;
  std::thread sender_, heartbeats_, receiver_;
};

}  // namespace muster
