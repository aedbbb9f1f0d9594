#include "muster/launch/agent/root_connection.h"

#include <fmt/format.h>

#include "muster/io/connect/handshake.h"

namespace muster {
namespace {

constexpr Duration kShutdownTime = std::chrono::seconds(2);  // for the last messages to a root that may be lost
constexpr Duration kPause = std::chrono::milliseconds(20);   // of the loop, in a wait for other nodes

}  // namespace

RootConnection::RootConnection(Loop& loop, const RunOptions& options, DeathNotice& death_notice, Events events)
    : loop_(loop),
      options_(options),
      death_notice_(death_notice),
      events_(std::move(events)),
      id_(to_hex(ByteView(generate_secret()).first(8))) {}

RootConnection::~RootConnection() {
  cancelled_ = true;
  if (connector_.joinable()) connector_.join();
  disconnect();
}

// The server is destroyed before the client: this ends the waits of the client's threads, even if the root is gone.
void RootConnection::disconnect() {
  claim_timer_.stop();
  former_address_.reset();
  coordinator_.reset();
  node_.server.reset();
  client_.reset();
  node_.give_up_root(options_.run_id, Deadline::after(kShutdownTime));
  node_ = {};
  moved_to_.reset();
  status_.write("", {});
}

void RootConnection::reconnect() {
  LastRoot last{node_.root_url, moved_to_.has_value()};
  if (last.leaves && node_.root) {  // this root has learned of another one
    last = {*moved_to_, false};
    leave(0, kShutdownTime);
  }
  disconnect();
  connect(std::move(last));
}

void RootConnection::connect(LastRoot last) {
  connector_ = std::thread([this, last = std::move(last)] {
    const NodeStoreEvents events{
        [this](std::string text) { loop_.post([this, text = std::move(text)] { events_.notice(text); }); },
        &cancelled_};
    opened_ = open_node_store(options_, events, last);
    loop_.post([this] {
      connector_.join();
      events_.connected(open());
    });
  });
}

Result<> RootConnection::open() {
  MUSTER_ASSIGN(node_, *std::exchange(opened_, std::nullopt));
  death_notice_.prepare({node_.upstream, node_.session, node_.root_url, JobKeys(options_.run_id).inbox(),
                         encode(NodeEvent{NodeEvent::Kind::kKilled, id_})});
  const std::unique_ptr<Store> last_root = std::move(node_.last_root);
  if (node_.root) MUSTER_TRY(become_root(last_root.get()));
  MUSTER_ASSIGN(auto store, open_store(node_.url, node_.secret, Deadline::after(kLeaveTime)));
  const auto job_event = [this](const JobEvent& event, const std::optional<Assignment>& assignment) {
    loop_.post([this, event, assignment] {
      if (event.kind == JobEvent::Kind::kMoved) moved_to_ = event.text;
      events_.job_event(event, assignment);
    });
  };
  const auto lost = [this](const Error& why) { loop_.post([this, why] { events_.lost(why); }); };
  MUSTER_ASSIGN(client_, RendezvousClient::start(std::move(store), {options_.run_id, id_, options_.heartbeat_timeout},
                                                 {job_event, lost}));
  status_.write(node_.url, node_.secret);
  if (!last_root) return {};
  const JobKeys keys(options_.run_id);
  return last_root->queue_push(keys.inbox(), encode(NodeEvent{NodeEvent::Kind::kBye, id_}),
                               Deadline::after(kShutdownTime));
}

// `last_root`: the store of a root that leaves, or null.
Result<> RootConnection::become_root(Store* last_root) {
  const Deadline deadline = Deadline::after(kLeaveTime);
  MUSTER_ASSIGN(auto store, open_store(node_.url, node_.secret, deadline));
  if (last_root != nullptr) {
    const JobKeys keys(options_.run_id);
    MUSTER_ASSIGN(const bool began, last_root->check({keys.persisted_state()}, deadline));
    if (began) {
      MUSTER_ASSIGN(const Bytes state, last_root->get(keys.persisted_state(), deadline));
      MUSTER_TRY(store->set(keys.persisted_state(), state, deadline));
    }
    former_address_.emplace(options_, node_.secret, node_.root_url);
    events_.notice(
        fmt::format("this node runs the job's root now, at {}; nodes that join later find it there, or with "
                    "a `muster run` at {}:{}",
                    node_.root_url, options_.master_addr, options_.master_port));
  }
  const auto failed = [this](const Error& why) { loop_.post([this, why] { events_.lost(why); }); };
  MUSTER_ASSIGN(coordinator_, Coordinator::start(std::move(store), options_.run_id, rendezvous_options(options_),
                                                 {node_.external_store.get(), node_.claim.get()}, failed));
  if (node_.claim) watch_claim();
  return {};
}

// Checks the claim often, so that the workers are stopped before a new root starts its own workers.
void RootConnection::watch_claim() {
  claim_timer_.start(options_.heartbeat_timeout / 10, [this] {
    if (node_.claim->held()) return watch_claim();
    events_.lost(fail(ErrorCode::kPeerLost, "this node could not renew its claim to be the job's root").value());
  });
}

void RootConnection::send(NodeEvent event) {
  if (client_) client_->send(std::move(event));
}

void RootConnection::publish(const Key& key, const std::string& json) {
  if (client_) client_->publish(key, to_bytes(json));
}

void RootConnection::join(NodeInfo node) {
  // If the root does not move, the workers expect rank 0 on the root's node.
  if (node_.root && !node_.external_store) node.wanted = 0;
  if (client_) client_->join(std::move(node));
}

bool RootConnection::hand_over(Duration patience) {
  const Deadline deadline = Deadline::after(kShutdownTime);
  if (!client_ || !coordinator_) return true;
  if (!node_.root_moves) client_->send({NodeEvent::Kind::kMove});
  if (!client_->flush(deadline)) return true;
  if (coordinator_->await_over(deadline)) return false;
  if (!node_.root_moves) await_all_left(0, patience);
  return true;
}

void RootConnection::leave(int expected, Duration patience) {
  if (!client_) return;
  client_->send({NodeEvent::Kind::kBye});
  const bool heard = client_->flush(Deadline::after(kShutdownTime));
  // Nodes below this one in the tree of proxies send their last events through this node's proxy.
  const Deadline deadline = Deadline::after(kLeaveTime);
  const auto has_tier_below = [this] { return node_.server->stat().clients > 1; };
  if (options_.store_fanout > 0 && !coordinator_)
    while (node_.server && has_tier_below() && !deadline.passed()) loop_.run_once(Deadline::after(kPause));
  if (heard && coordinator_) await_all_left(expected, patience);
}

void RootConnection::await_all_left(int expected, Duration patience) {
  const Deadline end = Deadline::after(patience);
  const auto all_left = [&] {
    return coordinator_->await_all_left(expected, end.or_sooner(end.clock().now() + kPause));
  };
  while (!all_left() && !end.passed()) loop_.poll();
}

}  // namespace muster
