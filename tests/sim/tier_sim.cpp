#include "sim/tier_sim.h"

#include <algorithm>
#include <optional>

#include "muster/base/check.h"
#include "muster/store/server/server_session.h"

namespace muster {

// A proxy with its link to the parent, and what the parent keeps of it; or the root.
struct TierSim::Node {
  int number = 0;     // its place
  size_t serial = 0;  // among all that ever were
  Duration clock_error{};
  bool crashed = false;
  bool touched = false;  // a flush is due
  TimePoint wakes{INT64_MAX};
  std::unique_ptr<StoreState> state;  // the root's
  std::unique_ptr<ProxyLink> up;      // a proxy's
  std::vector<int> children;

  // The link to the parent. What was sent on an earlier one falls to the ground.
  uint64_t link = 0;
  bool linked = false;
  TimePoint last_arrival[2];
  TimePoint partitioned_until;
  TimePoint unlinked_since;

  // The parent's end of this child's session.
  std::optional<ServerSession> host;
  bool revoked = false;    // its leases, since it was heard last
  bool has_input = false;  // the host may have something to send
};

namespace {

SessionId session_id(size_t serial) {
  SessionId id{};
  std::memcpy(id.data(), &serial, sizeof serial);
  return id;
}

}  // namespace

TierSim::TierSim(Options options, uint64_t seed, std::function<void(int, Reply)> deliver)
    : options_(std::move(options)), random_(seed), deliver_(std::move(deliver)) {
  places_.resize(static_cast<size_t>(options_.nodes));
  for (int i = 0; i < options_.nodes; ++i) {
    settle(i);
    if (i > 0) parent_of(at(i)).children.push_back(i);
  }
  for (Node* node : places_) {
    if (node->up) time_.after(Duration(random_.below(1'000'000)), [this, node] { dial(*node); });
  }
  time_.after(1s, [this] { look_for_the_silent(); });
}

TierSim::Node& TierSim::settle(int place) {
  Node& node = *nodes_.emplace_back(std::make_unique<Node>());
  node.number = place;
  node.serial = nodes_.size() - 1;
  node.clock_error = Duration(static_cast<int64_t>(random_.below(uint64_t{1} << 44)));
  if (place == 0) node.state = std::make_unique<StoreState>();
  if (place > 0) {
    node.up = std::make_unique<ProxyLink>(ProxyLink::Options{options_.proxy, "the root"}, session_id(node.serial));
  }
  places_[static_cast<size_t>(place)] = &node;
  return node;
}

TierSim::~TierSim() = default;

TimePoint TierSim::local_time(const Node& node) const { return time_.now() + node.clock_error; }
ClientId TierSim::session_of(const Node& node) { return kFirstSession + static_cast<ClientId>(node.serial); }
TierSim::Node& TierSim::parent_of(const Node& node) {
  return at(muster::parent_of(node.number, options_.nodes, options_.fanout));
}
bool TierSim::crashed(int node) const { return places_[static_cast<size_t>(node)]->crashed; }
size_t TierSim::root_waiters() const { return places_[0]->state->waiters(); }

void TierSim::submit(int node, ClientId client, Request request) {
  Node& asked = at(node);
  if (!asked.crashed) ask(asked, client, std::move(request));
}

void TierSim::drop(int node, ClientId client) {
  Node& asked = at(node);
  if (asked.crashed) return;
  if (asked.up) {
    asked.up->drop(client, local_time(asked));
  } else {
    asked.state->drop(client);
  }
  touch(asked);
}

void TierSim::ask(Node& node, ClientId client, Request request) {
  if (node.up) {
    node.up->submit(std::move(request), client, local_time(node));
  } else {
    handle_replies(node, node.state->apply(std::move(request), client));
  }
  touch(node);
}

void TierSim::handle_replies(Node& node, Replies replies) {
  for (Reply& reply : replies) {
    if (reply.client < kFirstSession) {
      deliver_(node.number, std::move(reply));
      continue;
    }
    Node& child = *nodes_[reply.client - kFirstSession];
    if (!child.host) continue;
    if (node.up) child.host->end_grants(node.up->grants_ended());
    child.host->reply(reply);
    child.has_input = true;
    touch(node);
  }
}

// ---- a node's turns

void TierSim::touch(Node& node) {
  if (std::exchange(node.touched, true)) return;
  time_.after(Duration{0}, [this, &node] { flush(node); });
}

void TierSim::flush(Node& node) {
  node.touched = false;
  if (node.crashed) return;
  if (node.up) {
    Bytes out;
    node.up->write(out, local_time(node));
    if (!out.empty()) send(node, /*up=*/true, std::move(out));
    handle_replies(node, node.up->take_replies());
  }
  const Duration lease = node.up ? node.up->lease_left(local_time(node)) : Duration(kLeaseTime);
  for (const int number : node.children) {
    Node& child = at(number);
    if (!std::exchange(child.has_input, false) || !child.host) continue;
    Bytes out;
    if (node.up) child.host->end_grants(node.up->grants_ended());
    child.host->write(out, lease);
    if (!out.empty()) send(child, /*up=*/false, std::move(out));
  }
  wake_at_need(node);
}

void TierSim::wake_at_need(Node& node) {
  if (!node.up) return;
  const auto local = node.up->next_wake();
  if (!local) return;
  const TimePoint when = std::max(*local + -node.clock_error, time_.now() + 1us);
  if (when >= node.wakes && node.wakes > time_.now()) return;
  node.wakes = when;
  time_.at(when, [this, &node] {
    if (node.crashed) return;
    if (node.linked && node.up->silent(local_time(node))) break_link(node);
    touch(node);
  });
}

// ---- links

void TierSim::dial(Node& node) {
  if (node.crashed || node.linked || node.up->lost()) return;
  if (time_.now() - node.unlinked_since > options_.grace) {
    node.up->give_up("no link for too long");
    return touch(node);
  }
  const Duration again = options_.redial / 2 + Duration(random_.below(static_cast<uint64_t>(options_.redial.count())));
  if (parent_of(node).crashed || node.partitioned_until > time_.now()) {
    return time_.after(again, [this, &node] { dial(node); });
  }
  ++node.link;
  node.linked = true;
  if (!node.host) node.host.emplace();
  count_proxies(parent_of(node));
  node.host->link_up(time_.now());
  send(node, /*up=*/true, node.up->begin(local_time(node)));
  touch(node);
}

void TierSim::break_link(Node& child) {
  if (!child.linked) return;
  child.linked = false;
  child.unlinked_since = time_.now();
  child.up->link_lost();
  // The parent may notice before the proxy dials again, or not.
  if (random_.chance(0.5) && child.host) child.host->link_lost();
  touch(child);
  time_.after(Duration(random_.below(static_cast<uint64_t>(options_.redial.count()))), [this, &child] { dial(child); });
}

void TierSim::cut(int node) {
  ++cuts_;
  break_link(at(node));
}

void TierSim::partition(int node, Duration how_long) { at(node).partitioned_until = time_.now() + how_long; }

void TierSim::crash(int place, bool told) {
  Node& node = at(place);
  node.crashed = true;
  for (const auto& below : nodes_) {
    if (below->up && &parent_of(*below) == &node) below->host.reset();
  }
  for (const int child : node.children) {
    time_.after(Duration(random_.below(1'000'000)), [this, child] { break_link(at(child)); });
  }
  if (told) time_.after(Duration(random_.below(1'000'000)), [this, &node] { end_session(node, /*told=*/true); });
}

void TierSim::restart(int place) {
  MUSTER_CHECK(place > 0 && crashed(place), "what the root held is lost with it");
  const std::vector<int> children = at(place).children;
  Node& node = settle(place);
  node.children = children;
  for (const int child : children) break_link(at(child));
  dial(node);
}

void TierSim::send(Node& child, bool up, Bytes bytes) {
  if (!child.linked) return;
  const bool to_root = parent_of(child).number == 0;
  if (to_root) root_bytes_ += bytes.size();
  Packet packet{std::move(bytes)};
  if (options_.cut > 0 && random_.chance(options_.cut)) {
    packet.bytes.resize(random_.below(packet.bytes.size() + 1));
    packet.cut_after = true;
  }
  const auto spread = static_cast<uint64_t>((options_.max_delay - options_.min_delay).count());
  TimePoint when = time_.now() + options_.min_delay + Duration(random_.below(spread + 1));
  if (child.partitioned_until > time_.now()) when = child.partitioned_until + options_.min_delay;
  when = std::max(when, child.last_arrival[up]);
  child.last_arrival[up] = when;
  auto held = std::make_shared<Packet>(std::move(packet));  // a std::function must be copyable
  time_.at(when, [this, &child, up, link = child.link, held] { arrive(child, up, link, std::move(*held)); });
}

void TierSim::arrive(Node& child, bool up, uint64_t link, Packet packet) {
  if (link != child.link || !child.linked) return;
  Node& receiver = up ? parent_of(child) : child;
  if (receiver.crashed || (up && !child.host)) return;
  if (up) {
    parent_hears(child, packet.bytes);
  } else {
    child_hears(child, packet.bytes);
  }
  if (packet.cut_after && link == child.link) {
    ++cuts_;
    break_link(child);
  }
}

void TierSim::child_hears(Node& child, ByteView bytes) {
  if (const auto heard = child.up->receive(bytes, local_time(child)); !heard) {
    child.linked = false;
    child.unlinked_since = time_.now();
  }
  touch(child);
}

// ---- the parent's end of a session

void TierSim::parent_hears(Node& child, ByteView bytes) {
  Node& parent = parent_of(child);
  auto input = child.host->receive(bytes, time_.now());
  MUSTER_CHECK(input.has_value(), "a proxy broke the grammar between tiers");
  if (parent.number == 0) root_frames_ += input->frames;
  child.revoked = false;
  child.has_input = true;
  for (Request& request : input->requests) ask(parent, session_of(child), std::move(request));
  touch(parent);
}

void TierSim::look_for_the_silent() {
  for (const auto& node : nodes_) {
    if (!node->host || parent_of(*node).crashed) continue;
    const Duration silence = time_.now() - node->host->heard();
    if (silence > kLeaseEnd && !std::exchange(node->revoked, true)) revoke(*node);
    if (silence > options_.grace + 5s) end_session(*node, /*told=*/false);
  }
  time_.after(1s, [this] { look_for_the_silent(); });
}

void TierSim::revoke(Node& child) {
  Node& parent = parent_of(child);
  Replies replies;
  const ClientId session = session_of(child);
  const uint64_t revocations = parent.up ? parent.up->revoke(session) : parent.state->revoke(session, replies);
  if (child.host) child.host->end_grants(revocations);
  handle_replies(parent, std::move(replies));
  touch(parent);
}

void TierSim::end_session(Node& child, bool told) {
  if (!child.host || parent_of(child).crashed) return;
  Node& parent = parent_of(child);
  const bool unused = told && !child.host->served_proxies();
  const TimePoint until = unused ? time_.now() : child.host->heard() + kLeaseEnd;
  child.host.reset();
  count_proxies(parent);
  drop(parent.number, session_of(child));
  time_.at(until, [this, &parent, &child] {
    if (!parent.crashed) revoke(child);
  });
}

void TierSim::count_proxies(Node& parent) {
  if (!parent.up) return;
  const auto has_session = [this](int child) { return at(child).host.has_value(); };
  parent.up->serves_proxies(static_cast<size_t>(std::ranges::count_if(parent.children, has_session)));
}

}  // namespace muster
