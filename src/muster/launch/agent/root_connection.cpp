#include "muster/launch/agent/root_connection.h"

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
  coordinator_.reset();
  node_.server.reset();
  client_.reset();
  node_.give_up_root(options_.run_id, Deadline::after(kShutdownTime));
  node_ = {};
  status_.write("", {});
}

void RootConnection::connect(bool again) {
  connector_ = std::thread([this, again] {
    const NodeStoreEvents events{
        [this](std::string text) { loop_.post([this, text = std::move(text)] { events_.notice(text); }); },
        &cancelled_};
    opened_ = open_node_store(options_, events, again);
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
  const auto lost = [this](const Error& why) { loop_.post([this, why] { events_.lost(why); }); };
  if (node_.root) {
    MUSTER_ASSIGN(auto store, open_store(node_.url, node_.secret, Deadline::after(kLeaveTime)));
    MUSTER_ASSIGN(coordinator_, Coordinator::start(std::move(store), options_.run_id, rendezvous_options(options_),
                                                   {node_.external_store.get(), node_.claim.get()}, lost));
    if (node_.claim) watch_claim();
  }
  MUSTER_ASSIGN(auto store, open_store(node_.url, node_.secret, Deadline::after(kLeaveTime)));
  const auto job_event = [this](const JobEvent& event, const std::optional<Assignment>& assignment) {
    loop_.post([this, event, assignment] { events_.job_event(event, assignment); });
  };
  MUSTER_ASSIGN(client_, RendezvousClient::start(std::move(store), {options_.run_id, id_, options_.heartbeat_timeout},
                                                 {job_event, lost}));
  status_.write(node_.url, node_.secret);
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

bool RootConnection::hand_over() {
  const Deadline deadline = Deadline::after(kShutdownTime);
  return !(client_ && client_->flush(deadline) && coordinator_ && coordinator_->await_over(deadline));
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
  if (!heard || !coordinator_) return;
  const Deadline end = Deadline::after(patience);
  const auto all_left = [&] {
    return coordinator_->await_all_left(expected, end.or_sooner(end.clock().now() + kPause));
  };
  while (!all_left() && !end.passed()) loop_.poll();
}

}  // namespace muster
