#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/random.h"
#include "muster/store/proxy/proxy_link.h"
#include "sim/virtual_time.h"

namespace muster {

/// Simulates a store server and its proxies without sockets. Node 0 is the root. Every other node is a proxy with a
/// link to its parent. All nodes run on one virtual clock. Links behave like TCP: bytes arrive in order and with a
/// delay. A link may be cut at any byte. The proxy then dials again. Each node's local clock is off by up to hours. The
/// same seed gives the same run.
class TierSim {
 public:
  struct Options {
    int nodes = 1;
    int fanout = 0;  ///< proxies below each node; 0: all proxies are below the root
    Proxy::Options proxy{.merge = true};
    Duration min_delay = 20us, max_delay = 500us;
    double cut = 0;  ///< the chance that a write cuts the link at one of its bytes
    Duration redial = 50ms;
    Duration grace = 30s;  ///< how long both ends keep a session without a link
  };
  /// `deliver` gets the replies for a node's own clients.
  TierSim(Options options, uint64_t seed, std::function<void(int node, Reply)> deliver);
  ~TierSim();

  VirtualTime& time() { return time_; }
  Random& random() { return random_; }
  /// Submits a request of a client of the node. Each node has its own client numbers, below kFirstSession.
  void submit(int node, ClientId client, Request request);
  void drop(int node, ClientId client);
  /// Breaks the node's link to its parent. The node dials again.
  void cut(int node);
  /// Delays all bytes of the node's link by `how_long`. Neither end sees an error.
  void partition(int node, Duration how_long);
  /// Ends the node and its clients. If `reported` is true, its session is closed at the parent, as by close_session().
  void crash(int node, bool reported = false);
  /// Starts a new proxy in place of a crashed one. The new proxy has no state of the old one.
  void restart(int node);
  bool crashed(int node) const;

  uint64_t root_frames() const { return root_frames_; }  ///< received by the root
  uint64_t root_bytes() const { return root_bytes_; }    ///< received and sent by the root
  size_t root_waiters() const;
  uint64_t cuts() const { return cuts_; }

  static constexpr ClientId kFirstSession = ClientId{1} << 40;

 private:
  struct Node;
  struct Packet {
    Bytes bytes;
    bool cut_after = false;
  };

  TimePoint local_time(const Node& node) const;
  static ClientId session_client(const Node& node);
  Node& at(int number) { return *current_[static_cast<size_t>(number)]; }
  Node& parent_of(const Node& node);
  Node& add_node(int number);
  void schedule_flush(Node& node);
  void flush(Node& node);
  void arm_wake(Node& node);
  void handle_replies(Node& node, Replies replies);
  void dial(Node& node);
  void break_link(Node& child);
  void send(Node& child, bool up, Bytes bytes);
  void arrive(Node& child, bool up, uint64_t link, Packet packet);
  void child_receives(Node& child, ByteView bytes);
  void parent_receives(Node& child, ByteView bytes);
  void ask(Node& parent, ClientId client, Request request);
  void check_sessions();
  void revoke(Node& child);
  void end_session(Node& child);
  void update_proxy_count(Node& parent);

  const Options options_;
  VirtualTime time_;
  Random random_;
  std::function<void(int, Reply)> deliver_;
  std::vector<std::unique_ptr<Node>> nodes_;  // includes crashed nodes that were replaced
  std::vector<Node*> current_;                // the current node of each number
  uint64_t root_frames_ = 0, root_bytes_ = 0, cuts_ = 0;
};

}  // namespace muster
