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

/// A node's connection to the job's root: sends its calls from one thread, signs of life from another, which no slow
/// write holds up, and waits for news in a third. An object is for one root: when that is lost, another is made for its
/// successor.
class RendezvousClient {
 public:
  struct Options {
    std::string run_id;
    std::string node_id;                                    ///< this agent's: nobody else's, ever
    Duration heartbeat_timeout = std::chrono::seconds(10);  ///< the root's; signs of life come five times as often
  };
  /// Called on threads of the member's own.
  struct Events {
    /// `assignment`: with a kStart, where this node has a place in the generation.
    std::function<void(const JobEvent& news, std::optional<Assignment> assignment)> news;
    /// The root, or its store, is lost. Nothing follows.
    std::function<void(const Error& why)> lost;
  };

  static Result<std::unique_ptr<RendezvousClient>> start(std::unique_ptr<Store> store, Options options, Events events);
  /// Returns once the wait for news has ended: after the outcome, a refusal, or the loss of the store. Destroy the
  /// node's store server first if none of those is certain.
  ~RendezvousClient();
  RendezvousClient(const RendezvousClient&) = delete;
  RendezvousClient& operator=(const RendezvousClient&) = delete;

  // What follows is sent in order, without waiting, and may be called from any thread.

  /// Asks for a place in the job, for the first time or after a kEvicted: what becomes of it are news.
  void join(NodeInfo node);
  void send(NodeEvent call);
  void publish(Key key, Bytes value);
  /// Until all that was sent has arrived; false at the deadline, or when the root is lost.
  bool flush(const Deadline& deadline);
  const JobKeys& keys() const { return keys_; }

 private:
  using Task = std::function<Result<>(Store&, const Deadline&)>;
  RendezvousClient(std::unique_ptr<Store> store, Options options, Events events);
  void enqueue(Task task);
  void send_all();
  void send_signs();
  void receive();
  Result<bool> hear(int64_t number);
  void lose(const Error& why);

  const std::unique_ptr<Store> store_;
  const Options options_;
  const Events events_;
  const JobKeys keys_;
  int64_t first_news_ = 1;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool sending_ = false, ending_ = false, lost_ = false;
  std::thread sender_, signs_, receiver_;
};

}  // namespace muster
