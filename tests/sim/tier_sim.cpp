#include "sim/tier_sim.h"

#include <algorithm>
#include <optional>

#include "muster/base/check.h"
#include "muster/store/server/server_session.h"

namespace muster {

// The root or a proxy. For a proxy, also its link to the parent and the parent's end of its session.
struct TierSim::Node {
  int number = 0;
  size_t serial = 0;  // unique, while a restarted node has the same number
  Duration clock_error{};
  bool crashed = false;
  bool flush_scheduled = false;
  TimePoint wakes{INT64_MAX};
  std::unique_ptr<StoreState> state;  // set for the root
  std::unique_ptr<ProxyLink> up;      // set for a proxy
  std::vector<int> children;

  // The link to the parent. Packets of earlier links are dropped.
  uint64_t link = 0;
  bool linked = false;
  TimePoint last_arrival[2];
  TimePoint partitioned_until;
  TimePoint unlinked_since;

  std::optional<ServerSession> session;  // the parent's end
  bool write_due = false;                // the parent's end may have bytes to send
  size_t proxies = 0;                    // number of children with a session
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
  current_.resize(static_cast<size_t>(options_.nodes));
  for (int i = 0; i < options_.nodes; ++i) {
    add_node(i);
    if (i > 0) parent_of(at(i)).children.push_back(i);
  }
  for (Node* node : current_) {
    if (node->up) time_.after(Duration(random_.below(1'000'000)), [this, node] { dial(*node); });
  }
  time_.after(1s, [this] { check_sessions(); });
}

TierSim::Node& TierSim::add_node(int number) {
  Node& node = *nodes_.emplace_back(std::make_unique<Node>());
  node.number = number;
  node.serial = nodes_.size() - 1;
  node.clock_error = Duration(static_cast<int64_t>(random_.below(uint64_t{1} << 44)));
  if (number == 0) node.state = std::make_unique<StoreState>();
  if (number > 0) {
    node.up = std::make_unique<ProxyLink>(ProxyLink::Options{options_.proxy, "the root"}, session_id(node.serial));
  }
  current_[static_cast<size_t>(number)] = &node;
  return node;
}

TierSim::~TierSim() = default;

TimePoint TierSim::local_time(const Node& node) const { return time_.now() + node.clock_error; }
ClientId TierSim::session_client(const Node& node) { return kFirstSession + static_cast<ClientId>(node.serial); }
TierSim::Node& TierSim::parent_of(const Node& node) {
  return at(muster::parent_of(node.number, options_.nodes, options_.fanout));
}
bool TierSim::crashed(int node) const { return current_[static_cast<size_t>(node)]->crashed; }
size_t TierSim::root_waiters() const { return current_[0]->state->waiters(); }

void TierSim::submit(int node, ClientId client, Request request) {
  Node& asked = at(node);
  if (!asked.crashed) ask(asked, client, std::move(request));
}

void TierSim::drop(int node, ClientId client) {
  Node& asked = at(node);
  if (asked.crashed) return;
  if (asked.up) {
    asked.up->drop(client);
  } else {
    asked.state->drop(client);
  }
  schedule_flush(asked);
}

void TierSim::ask(Node& node, ClientId client, Request request) {
  if (node.up) {
    node.up->submit(std::move(request), client, local_time(node));
  } else {
    handle_replies(node, node.state->apply(std::move(request), client));
  }
  schedule_flush(node);
}

void TierSim::handle_replies(Node& node, Replies replies) {
  for (Reply& reply : replies) {
    if (reply.client < kFirstSession) {
      deliver_(node.number, std::move(reply));
      continue;
    }
    Node& child = *nodes_[reply.client - kFirstSession];
    if (!child.session) continue;
    if (node.up) child.session->end_grants(node.up->grants_ended());
    child.session->reply(reply);
    child.write_due = true;
    schedule_flush(node);
  }
}

// ---- a node's turns

void TierSim::schedule_flush(Node& node) {
  if (std::exchange(node.flush_scheduled, true)) return;
  time_.after(Duration{0}, [this, &node] { flush(node); });
}

void TierSim::flush(Node& node) {
  node.flush_scheduled = false;
  if (node.crashed) return;
  if (node.up) {
    Bytes out;
    node.up->write(out, local_time(node));
    if (!out.empty()) send(node, /*up=*/true, std::move(out));
    handle_replies(node, node.up->take_replies());
  }
  const Duration lease_left = node.up ? node.up->lease_left(local_time(node)) : Duration::max();
  for (const int child_number : node.children) {
    Node& child = at(child_number);
    if (!std::exchange(child.write_due, false) || !child.session) continue;
    Bytes out;
    if (node.up) child.session->end_grants(node.up->grants_ended());
    child.session->write(out, node.proxies, lease_left);
    if (!out.empty()) send(child, /*up=*/false, std::move(out));
  }
  arm_wake(node);
}

void TierSim::arm_wake(Node& node) {
  if (!node.up) return;
  const auto local = node.up->next_wake();
  if (!local) return;
  const TimePoint when = std::max(*local + -node.clock_error, time_.now() + 1us);
  if (when >= node.wakes && node.wakes > time_.now()) return;
  node.wakes = when;
  time_.at(when, [this, &node] {
    if (node.crashed) return;
    if (node.linked && node.up->silent(local_time(node))) break_link(node);
    schedule_flush(node);
  });
}

// ---- links

void TierSim::dial(Node& node) {
  if (node.crashed || node.linked || node.up->lost()) return;
  if (time_.now() - node.unlinked_since > options_.grace) {
    node.up->give_up("no link for too long");
    return schedule_flush(node);
  }
  const Duration again = options_.redial / 2 + Duration(random_.below(static_cast<uint64_t>(options_.redial.count())));
  if (parent_of(node).crashed || node.partitioned_until > time_.now()) {
    return time_.after(again, [this, &node] { dial(node); });
  }
  ++node.link;
  node.linked = true;
  if (!node.session) node.session.emplace(time_, SessionExpiry::Limits{kLeaseTime, options_.grace});
  update_proxy_count(parent_of(node));
  node.session->link_up();
  send(node, /*up=*/true, node.up->begin(local_time(node)));
  schedule_flush(node);
}

void TierSim::break_link(Node& child) {
  if (!child.linked) return;
  child.linked = false;
  child.unlinked_since = time_.now();
  child.up->link_lost();
  // In half of the cases the parent notices the loss before the proxy dials again.
  if (random_.chance(0.5) && child.session) child.session->link_lost();
  schedule_flush(child);
  time_.after(Duration(random_.below(static_cast<uint64_t>(options_.redial.count()))), [this, &child] { dial(child); });
}

void TierSim::cut(int node) {
  ++cuts_;
  break_link(at(node));
}

void TierSim::partition(int node, Duration how_long) { at(node).partitioned_until = time_.now() + how_long; }

void TierSim::crash(int number, bool reported) {
  Node& node = at(number);
  node.crashed = true;
  for (const auto& below : nodes_) {
    if (below->up && &parent_of(*below) == &node) below->session.reset();
  }
  for (const int child : node.children) {
    time_.after(Duration(random_.below(1'000'000)), [this, child] { break_link(at(child)); });
  }
  if (!reported) return;
  time_.after(Duration(random_.below(1'000'000)), [this, &node] {
    if (!node.session || parent_of(node).crashed) return;
    node.session->link_up();
    (void)node.session->receive(encode_session_close());
    end_session(node);
  });
}

void TierSim::restart(int number) {
  MUSTER_CHECK(number > 0 && crashed(number), "only a crashed proxy can be restarted");
  const std::vector<int> children = at(number).children;
  Node& node = add_node(number);
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
  if (receiver.crashed || (up && !child.session)) return;
  if (up) {
    parent_receives(child, packet.bytes);
  } else {
    child_receives(child, packet.bytes);
  }
  if (packet.cut_after && link == child.link) {
    ++cuts_;
    break_link(child);
  }
}

void TierSim::child_receives(Node& child, ByteView bytes) {
  if (const auto received = child.up->receive(bytes, local_time(child)); !received) {
    child.linked = false;
    child.unlinked_since = time_.now();
  }
  schedule_flush(child);
}

// ---- the parent's end of a session

void TierSim::parent_receives(Node& child, ByteView bytes) {
  Node& parent = parent_of(child);
  auto input = child.session->receive(bytes);
  MUSTER_CHECK(input.has_value(), "a proxy sent a frame that the grammar does not allow");
  if (parent.number == 0) root_frames_ += input->frames;
  child.write_due = true;
  for (Request& request : input->requests) ask(parent, session_client(child), std::move(request));
  schedule_flush(parent);
}

void TierSim::check_sessions() {
  for (const auto& node : nodes_) {
    if (!node->session || parent_of(*node).crashed) continue;
    const SessionExpiry::Expired expired = node->session->expired(parent_of(*node).proxies);
    if (expired.leases) revoke(*node);
    if (expired.link) {
      break_link(*node);
      node->session->link_lost();
    }
    if (expired.session) end_session(*node);
  }
  time_.after(1s, [this] { check_sessions(); });
}

void TierSim::revoke(Node& child) {
  Node& parent = parent_of(child);
  Replies replies;
  const ClientId session = session_client(child);
  const uint64_t revocations = parent.up ? parent.up->revoke(session) : parent.state->revoke(session, replies);
  if (child.session) child.session->end_grants(revocations);
  handle_replies(parent, std::move(replies));
  schedule_flush(parent);
}

void TierSim::end_session(Node& child) {
  Node& parent = parent_of(child);
  const TimePoint leases_end = child.session->leases_end();
  child.session.reset();
  update_proxy_count(parent);
  drop(parent.number, session_client(child));
  time_.at(leases_end, [this, &parent, &child] {
    if (!parent.crashed) revoke(child);
  });
}

void TierSim::update_proxy_count(Node& parent) {
  const auto has_session = [this](int child) { return at(child).session.has_value(); };
  parent.proxies = static_cast<size_t>(std::ranges::count_if(parent.children, has_session));
  if (parent.up) parent.up->serves_proxies(parent.proxies);
}

}  // namespace muster
