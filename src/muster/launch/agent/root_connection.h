#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "muster/launch/agent/death_notice.h"
#include "muster/launch/agent/former_address.h"
#include "muster/launch/agent/node_store.h"
#include "muster/launch/agent/status_file.h"
#include "muster/launch/rendezvous/coordinator.h"
#include "muster/launch/rendezvous/rendezvous_client.h"
#include "muster/launch/timer.h"

namespace muster {

/// A node's connection to the job's root: finds the root or becomes it, and passes events both ways. For the thread
/// that drives the loop; all events arrive on that thread.
///
/// It has more than 12 fields, because it owns a thread, the result of that thread, and objects that must be destroyed
/// in one order.
class RootConnection {
 public:
  struct Events {
    std::function<void(const std::string&)> notice;  ///< for the user
    std::function<void(Result<>)> connected;         ///< the result of connect()
    std::function<void(const JobEvent&, const std::optional<Assignment>&)> job_event;
    std::function<void(const Error&)> lost;  ///< may be reported several times
  };

  /// Fills in `death_notice` for the agent's monitor. Borrows `options` and `death_notice`.
  RootConnection(Loop& loop, const RunOptions& options, DeathNotice& death_notice, Events events);
  ~RootConnection();
  RootConnection(const RootConnection&) = delete;
  RootConnection& operator=(const RootConnection&) = delete;

  /// Starts a thread that finds the root, because resolving names, connecting and waiting for the root all block.
  /// `last`: see open_node_store().
  void connect(LastRoot last = {});
  /// Leaves a root that was lost, or that moves, and finds the next one.
  void reconnect();
  /// Sends an event to the root. Without a root the event is dropped.
  void send(NodeEvent event);
  void publish(const Key& key, const std::string& json);
  void join(NodeInfo node);
  /// Lets another node become the root, now or when this object is destroyed. Waits at most for `patience` until all
  /// nodes have moved. False if the job is over: then call leave(), so that the other nodes hear the outcome.
  bool hand_over(Duration patience);
  /// Tells the root that this node no longer needs it, and waits until no other node needs this node. The root waits
  /// until `expected` nodes have received the outcome, at most for `patience`.
  void leave(int expected, Duration patience);

  NodeStore& node() { return node_; }

 private:
  void disconnect();
  Result<> open();
  Result<> become_root(Store* last_root);
  void await_all_left(int expected, Duration patience);
  void watch_claim();

  Loop& loop_;
  const RunOptions& options_;
  DeathNotice& death_notice_;
  const Events events_;
  const std::string id_;
  StatusFile status_{current_environment(), options_.run_id};
  std::atomic<bool> cancelled_ = false;  // ends the connector's waits
  std::thread connector_;
  std::optional<Result<NodeStore>> opened_;  // written by the connector thread, read after it was joined
  NodeStore node_;
  std::optional<std::string> moved_to_;  // set if the root moves: the next root's address, or empty if it is not known
  std::unique_ptr<Coordinator> coordinator_;
  std::optional<FormerAddress> former_address_;
  std::unique_ptr<RendezvousClient> client_;
  Timer claim_timer_{loop_};
};

}  // namespace muster
