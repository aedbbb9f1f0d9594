#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/random.h"
#include "muster/store/proxy/proxy_link.h"
#include "sim/virtual_time.h"

namespace muster {

/// The store's tiers without sockets: node 0 is the root, every other node a proxy with a link to its parent, all on
/// one virtual clock. Links are as TCP shows itself: ordered bytes that come late, until a link is cut, anywhere; then
/// the proxy dials again. Each node's own clock is off by hours. One seed, one run.
class TierSim {
 public:
  struct Options {
    int nodes = 1;
    int fanout = 0;  ///< 0: all proxies hang on the root
    Proxy::Options proxy{.merge = true};
    Duration min_delay = 20us, max_delay = 500us;
    double cut = 0;  ///< chance that a write is cut somewhere, and the link with it
    Duration redial = 50ms;
    Duration grace = 30s;  ///< how long a session outlives its link, at both ends
  };
  /// `deliver` gets the replies of a node's own clients.
  TierSim(Options options, uint64_t seed, std::function<void(int node, Reply)> deliver);
  ~TierSim();

  VirtualTime& time() { return time_; }
  Random& random() { return random_; }
  /// A client of the node asks. Numbers of clients are below kFirstSession, and each node's own.
  void submit(int node, ClientId client, Request request);
  void drop(int node, ClientId client);
  /// The node's link to its parent breaks now, and is dialled again.
  void cut(int node);
  /// Nothing passes the node's link for so long, and neither end is told.
  void partition(int node, Duration how_long);
  /// The node is no more, nor are its clients. `told`: its guard lets the parent know that nobody comes back.
  void crash(int node, bool told = false);
  /// A proxy that crashed is started anew: it remembers nothing.
  void restart(int node);
  bool crashed(int node) const;

  uint64_t root_frames() const { return root_frames_; }  ///< that came to the root
  uint64_t root_bytes() const { return root_bytes_; }    ///< that came to the root and left it
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
  static ClientId session_of(const Node& node);
  Node& at(int place) { return *places_[static_cast<size_t>(place)]; }
  Node& parent_of(const Node& node);
  Node& settle(int place);
  void touch(Node& node);
  void flush(Node& node);
  void wake_at_need(Node& node);
  void handle_replies(Node& node, Replies replies);
  void dial(Node& node);
  void break_link(Node& child);
  void send(Node& child, bool up, Bytes bytes);
  void arrive(Node& child, bool up, uint64_t link, Packet packet);
  void child_hears(Node& child, ByteView bytes);
  void parent_hears(Node& child, ByteView bytes);
  void ask(Node& parent, ClientId client, Request request);
  void look_for_the_silent();
  void revoke(Node& child);
  void end_session(Node& child, bool told);
  void count_proxies(Node& parent);

  const Options options_;
  VirtualTime time_;
  Random random_;
  std::function<void(int, Reply)> deliver_;
  std::vector<std::unique_ptr<Node>> nodes_;  // also those that crashed and were replaced
  std::vector<Node*> places_;                 // who is where
  uint64_t root_frames_ = 0, root_bytes_ = 0, cuts_ = 0;
};

}  // namespace muster
