#include "muster/launch/rendezvous/coordinator.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "muster/base/log.h"

namespace muster {
namespace {

using nlohmann::json;

constexpr Duration kStoreTime = std::chrono::seconds(30);  // for one request to the node's own or the external store
constexpr Duration kDeleteTime = std::chrono::seconds(1);
constexpr size_t kKeysPerRequest = 4096;
constexpr size_t kDeletedAtOnce = 256;
constexpr std::string_view kStopMark = "stop", kOverMark = "over?";  // in the inbox, from this process

Deadline store_deadline() { return Deadline::after(kStoreTime); }

Result<> read_persisted_state(Store& persisted_state, const Key& key, RendezvousOptions& options) {
  MUSTER_ASSIGN(const bool there, persisted_state.check({key}, store_deadline()));
  if (!there) return {};
  MUSTER_ASSIGN(const Bytes bytes, persisted_state.get(key, store_deadline()));
  const json value = json::parse(bytes.begin(), bytes.end(), nullptr, /*allow_exceptions=*/false);
  if (!value.is_object() || !value.contains("generation") || !value["generation"].is_number_unsigned() ||
      !value.contains("restarts") || !value["restarts"].is_number_unsigned())
    return fail(ErrorCode::kProtocol, "the rendezvous store holds a value that is not muster's at \"" + key + "\"");
  constexpr uint64_t kMax = 1 << 30;
  options.first_generation = static_cast<int>(std::min(value["generation"].get<uint64_t>(), kMax)) + 1;
  options.restarts = static_cast<int>(std::min(value["restarts"].get<uint64_t>(), kMax));
  return {};
}

}  // namespace

Result<std::unique_ptr<Coordinator>> Coordinator::start(std::unique_ptr<Store> store, const std::string& run_id,
                                                        RendezvousOptions options, Failover failover,
                                                        std::function<void(const Error&)> failed) {
  if (failover.persisted_state == nullptr) failover.persisted_state = store.get();
  MUSTER_TRY(read_persisted_state(*failover.persisted_state, JobKeys(run_id).persisted_state(), options));
  std::unique_ptr<Coordinator> made(new Coordinator(std::move(store), run_id, options, failover, std::move(failed)));
  made->thread_ = std::thread([self = made.get()] { self->run(); });
  return made;
}

Coordinator::Coordinator(std::unique_ptr<Store> store, const std::string& run_id, const RendezvousOptions& options,
                         Failover failover, std::function<void(const Error&)> failed)
    : store_(std::move(store)),
      keys_(run_id),
      failover_(failover),
      failed_(std::move(failed)),
      rendezvous_(options, steady_clock().now()) {}

Coordinator::~Coordinator() {
  stop_ = true;
  (void)store_->queue_push(keys_.inbox(), as_bytes(kStopMark), store_deadline());  // ends the thread's wait
  thread_.join();
}

void Coordinator::run() {
  while (!stop_) {
    if (const auto done = step(); !done) {
      if (!stop_) failed_(done.error());
      return;
    }
  }
}

Result<> Coordinator::step() {
  const TimePoint next = garbage_keys_.empty() ? rendezvous_.next_tick() : steady_clock().now() + 1ms;
  const auto received = store_->queue_pop(keys_.inbox(), Deadline::at(next));
  if (!received && received.error().code != ErrorCode::kTimeout) return tl::unexpected(received.error());
  if (stop_) return {};
  if (!received) MUSTER_TRY(delete_some());
  const TimePoint now = steady_clock().now();
  if (received) MUSTER_TRY(handle(*received, now));
  if (now >= rendezvous_.next_tick()) {
    MUSTER_TRY(publish(rendezvous_.tick(now)));
    MUSTER_TRY(publish_nodes());
  }
  if (!rendezvous_.all_left()) return {};
  const std::lock_guard lock(mutex_);
  departed_ = rendezvous_.departed();
  changed_.notify_all();
  return {};
}

Result<> Coordinator::handle(ByteView bytes, TimePoint now) {
  if (to_string(bytes) == kOverMark) {
    const std::lock_guard lock(mutex_);
    over_ = rendezvous_.over();
    changed_.notify_all();
    return {};
  }
  const auto event = parse_node_event(bytes);
  if (event) return publish(rendezvous_.handle(*event, now));
  log(LogLevel::kWarning, event.error().message);
  return {};
}

Result<> Coordinator::publish(const std::vector<JobEvent>& events) {
  for (const JobEvent& event : events) {
    // If the claim is not held, another node may be the root already. Two roots must never make decisions.
    if (failover_.claim != nullptr && !failover_.claim->held())
      return fail(ErrorCode::kPeerLost, "this node could not renew its claim to be the job's root");
    if (event.kind == JobEvent::Kind::kStart) MUSTER_TRY(publish_start());
    if (event.kind == JobEvent::Kind::kMoved && !event.text.empty())
      MUSTER_TRY(store_->set(keys_.root(), as_bytes(event.text), store_deadline()));
    if (event.kind == JobEvent::Kind::kOutcome)
      (void)failover_.persisted_state->delete_key(keys_.persisted_state(), store_deadline());
    MUSTER_TRY(store_->set(keys_.event(++event_count_), encode(event), store_deadline()));
    MUSTER_TRY(store_->add(keys_.event_count(), 1, store_deadline()));
    if (event.kind != JobEvent::Kind::kProgress) MUSTER_TRY(publish_nodes());
  }
  return {};
}

Result<> Coordinator::publish_start() {
  const int generation = rendezvous_.generation();
  const json state = {{"generation", generation}, {"restarts", rendezvous_.restarts()}};
  MUSTER_TRY(failover_.persisted_state->set(keys_.persisted_state(), to_bytes(state.dump()), store_deadline()));
  if (generation > 0) MUSTER_TRY(collect_garbage(generation - 1));
  std::vector<Key> keys;
  std::vector<Bytes> values;
  const auto& assignments = rendezvous_.assignments();
  for (size_t i = 0; i < assignments.size(); ++i) {
    keys.push_back(keys_.assignment(generation, assignments[i].first));
    values.push_back(encode(assignments[i].second));
    if (keys.size() < kKeysPerRequest && i + 1 < assignments.size()) continue;
    MUSTER_TRY(store_->multi_set(keys, values, store_deadline()));
    keys.clear();
    values.clear();
  }
  return {};
}

// Publishes the root's view of the nodes for `muster status`.
Result<> Coordinator::publish_nodes() {
  const TimePoint now = steady_clock().now();
  json nodes = json::array();
  for (const auto& node : rendezvous_.nodes()) {
    nodes.push_back({{"host", node.info.host},
                     {"pid", node.info.pid},
                     {"process_domain", node.info.process_domain},
                     {"workers", node.info.nproc},
                     {"node_rank", node.node_rank},
                     {"state", node.state},
                     {"heard_ago", std::chrono::duration<double>(now - node.last_heard).count()}});
  }
  const json value = {{"generation", rendezvous_.generation()},
                      {"restarts", rendezvous_.restarts()},
                      {"progress", rendezvous_.progress()},
                      {"nodes", nodes}};
  return store_->set(keys_.nodes(), to_bytes(value.dump(-1, ' ', false, json::error_handler_t::replace)),
                     store_deadline());
}

// Collects all keys of a generation that has ended.
Result<> Coordinator::collect_garbage(int generation) {
  for (const std::string& prefix : {generation_prefix(generation), keys_.assignment(generation, ""),
                                    keys_.workers(generation), keys_.exits(generation)}) {
    MUSTER_ASSIGN(const auto keys, store_->list_keys(prefix, store_deadline()));
    garbage_keys_.insert(garbage_keys_.end(), keys.begin(), keys.end());
  }
  return {};
}

Result<> Coordinator::delete_some() {
  for (size_t i = 0; i < kDeletedAtOnce && !garbage_keys_.empty(); ++i) {
    const auto gone = store_->delete_key(garbage_keys_.back(), Deadline::after(kDeleteTime));
    // A silent node may hold a lease of the key. The key is deleted when the lease ends, so do not wait.
    if (!gone && gone.error().code != ErrorCode::kTimeout) return tl::unexpected(gone.error());
    garbage_keys_.pop_back();
    if (!gone) return {};
  }
  return {};
}

bool Coordinator::await_all_left(int expected, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  while (departed_ < expected && !deadline.passed())
    changed_.wait_for(lock, std::min<Duration>(deadline.left(), std::chrono::hours(1)));
  return departed_ >= expected;
}

bool Coordinator::await_over(const Deadline& deadline) {
  {
    const std::lock_guard lock(mutex_);
    over_.reset();
  }
  if (!store_->queue_push(keys_.inbox(), as_bytes(kOverMark), deadline)) return false;
  std::unique_lock lock(mutex_);
  while (!over_ && !deadline.passed())
    changed_.wait_for(lock, std::min<Duration>(deadline.left(), std::chrono::hours(1)));
  return over_.value_or(false);
}

}  // namespace muster
