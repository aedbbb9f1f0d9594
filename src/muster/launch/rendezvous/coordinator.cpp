#include "muster/launch/rendezvous/coordinator.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "muster/base/log.h"

namespace muster {
namespace {

using nlohmann::json;

constexpr Duration kStoreTime = std::chrono::seconds(30);  // for the node's own store, or one that outlives it
constexpr Duration kDeleteTime = std::chrono::seconds(1);
constexpr size_t kKeysPerRequest = 4096;
constexpr size_t kDeletedAtOnce = 256;

Deadline soon() { return Deadline::after(kStoreTime); }

Result<> read_ledger(Store& persisted_state, const Key& key, RendezvousOptions& options) {
  MUSTER_ASSIGN(const bool there, persisted_state.check({key}, soon()));
  if (!there) return {};
  MUSTER_ASSIGN(const Bytes bytes, persisted_state.get(key, soon()));
  const json value = json::parse(bytes.begin(), bytes.end(), nullptr, /*allow_exceptions=*/false);
  if (!value.is_object() || !value.contains("generation") || !value["generation"].is_number_unsigned() ||
      !value.contains("restarts") || !value["restarts"].is_number_unsigned())
    return fail(ErrorCode::kProtocol, "the rendezvous store holds something else than muster's at \"" + key + "\"");
  constexpr uint64_t kMax = 1 << 30;
  options.first_generation = static_cast<int>(std::min(value["generation"].get<uint64_t>(), kMax)) + 1;
  options.restarts = static_cast<int>(std::min(value["restarts"].get<uint64_t>(), kMax));
  return {};
}

}  // namespace

Result<std::unique_ptr<Coordinator>> Coordinator::start(std::unique_ptr<Store> store, const std::string& run_id,
                                                        RendezvousOptions options, Failover succession,
                                                        std::function<void(const Error&)> failed) {
  if (succession.persisted_state != nullptr)
    MUSTER_TRY(read_ledger(*succession.persisted_state, JobKeys(run_id).persisted_state(), options));
  std::unique_ptr<Coordinator> made(new Coordinator(std::move(store), run_id, options, succession, std::move(failed)));
  made->thread_ = std::thread([self = made.get()] { self->run(); });
  return made;
}

Coordinator::Coordinator(std::unique_ptr<Store> store, const std::string& run_id, const RendezvousOptions& options,
                         Failover succession, std::function<void(const Error&)> failed)
    : store_(std::move(store)),
      keys_(run_id),
      succession_(succession),
      failed_(std::move(failed)),
      rendezvous_(options, steady_clock().now()) {}

Coordinator::~Coordinator() {
  stop_ = true;
  (void)store_->queue_push(keys_.inbox(), as_bytes("stop"), soon());  // ends the thread's wait
  thread_.join();
}

void Coordinator::run() {
  while (!stop_) {
    if (const auto done = turn(); !done) {
      if (!stop_) failed_(done.error());
      return;
    }
  }
}

Result<> Coordinator::turn() {
  const TimePoint next = garbage_keys_.empty() ? rendezvous_.next_tick() : steady_clock().now() + 1ms;
  const auto word = store_->queue_pop(keys_.inbox(), Deadline::at(next));
  if (!word && word.error().code != ErrorCode::kTimeout) return tl::unexpected(word.error());
  if (stop_) return {};
  if (!word) MUSTER_TRY(delete_some());
  const TimePoint now = steady_clock().now();
  if (word) {
    const auto call = parse_call(*word);
    if (!call) {
      log(LogLevel::kWarning, call.error().message);
    } else {
      MUSTER_TRY(publish(rendezvous_.handle(*call, now)));
    }
  }
  if (now >= rendezvous_.next_tick()) {
    MUSTER_TRY(publish(rendezvous_.tick(now)));
    MUSTER_TRY(publish_nodes());
  }
  if (!rendezvous_.all_left()) return {};
  const std::lock_guard lock(mutex_);
  departed_ = rendezvous_.departed();
  turned_.notify_all();
  return {};
}

Result<> Coordinator::publish(const std::vector<JobEvent>& all) {
  for (const JobEvent& news : all) {
    // Another may be the root once the claim is not certain any more: two must never decide.
    if (succession_.claim != nullptr && !succession_.claim->held())
      return fail(ErrorCode::kPeerLost, "this node could not renew its claim to be the job's root");
    if (news.kind == JobEvent::Kind::kStart) MUSTER_TRY(publish_start());
    if (news.kind == JobEvent::Kind::kOutcome && succession_.persisted_state != nullptr)
      (void)succession_.persisted_state->delete_key(keys_.persisted_state(), soon());
    MUSTER_TRY(store_->set(keys_.news(++news_), encode(news), soon()));
    MUSTER_TRY(store_->add(keys_.news_count(), 1, soon()));
    if (news.kind != JobEvent::Kind::kProgress) MUSTER_TRY(publish_nodes());
  }
  return {};
}

Result<> Coordinator::publish_start() {
  const int generation = rendezvous_.generation();
  if (succession_.persisted_state != nullptr) {
    const json state = {{"generation", generation}, {"restarts", rendezvous_.restarts()}};
    MUSTER_TRY(succession_.persisted_state->set(keys_.persisted_state(), to_bytes(state.dump()), soon()));
  }
  if (generation > 0) MUSTER_TRY(doom(generation - 1));
  std::vector<Key> keys;
  std::vector<Bytes> values;
  const auto& places = rendezvous_.places();
  for (size_t i = 0; i < places.size(); ++i) {
    keys.push_back(keys_.place(generation, places[i].first));
    values.push_back(encode(places[i].second));
    if (keys.size() < kKeysPerRequest && i + 1 < places.size()) continue;
    MUSTER_TRY(store_->multi_set(keys, values, soon()));
    keys.clear();
    values.clear();
  }
  return {};
}

// For `muster status`.
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
                     {"heard_ago", std::chrono::duration<double>(now - node.heard).count()}});
  }
  const json value = {{"generation", rendezvous_.generation()},
                      {"restarts", rendezvous_.restarts()},
                      {"progress", rendezvous_.progress()},
                      {"nodes", nodes}};
  return store_->set(keys_.nodes(), to_bytes(value.dump(-1, ' ', false, json::error_handler_t::replace)), soon());
}

// Everything of a generation whose processes are all gone.
Result<> Coordinator::doom(int generation) {
  for (const std::string& prefix : {generation_prefix(generation), keys_.place(generation, ""),
                                    keys_.workers(generation), keys_.exits(generation)}) {
    MUSTER_ASSIGN(const auto keys, store_->list_keys(prefix, soon()));
    garbage_keys_.insert(garbage_keys_.end(), keys.begin(), keys.end());
  }
  return {};
}

Result<> Coordinator::delete_some() {
  for (size_t i = 0; i < kDeletedAtOnce && !garbage_keys_.empty(); ++i) {
    const auto gone = store_->delete_key(garbage_keys_.back(), Deadline::after(kDeleteTime));
    // One that a silent node holds a lease of goes when that has ended; nobody needs to wait for it.
    if (!gone && gone.error().code != ErrorCode::kTimeout) return tl::unexpected(gone.error());
    garbage_keys_.pop_back();
    if (!gone) return {};
  }
  return {};
}

bool Coordinator::await_all_left(int expected, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  while (departed_ < expected && !deadline.passed())
    turned_.wait_for(lock, std::min<Duration>(deadline.left(), std::chrono::hours(1)));
  return departed_ >= expected;
}

}  // namespace muster
