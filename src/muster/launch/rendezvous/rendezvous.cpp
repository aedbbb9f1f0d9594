#include "muster/launch/rendezvous/rendezvous.h"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <set>

#include "muster/launch/failure.h"

namespace muster {
namespace {

constexpr size_t kMaxNamed = 16;                          // missing nodes that a message lists
constexpr Duration kStopTime = std::chrono::seconds(60);  // for a node to stop its workers, beyond its own timeout
constexpr Duration kMaxJoinDelay = std::chrono::seconds(3);
constexpr Duration kQuick = std::chrono::seconds(10);  // a generation that fails sooner may fail again and again
constexpr Duration kFirstPause = std::chrono::seconds(1);
constexpr Duration kProgressInterval = std::chrono::seconds(3);
constexpr Duration kProgressRepeat = std::chrono::seconds(30);  // before unchanged progress is repeated

double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

std::string name_of(const NodeInfo& node) { return fmt::format("host {} (agent's pid {})", node.host, node.pid); }

std::string range(const RendezvousOptions& options) {
  return options.min_nodes == options.max_nodes ? fmt::format("{}", options.max_nodes)
                                                : fmt::format("{}:{}", options.min_nodes, options.max_nodes);
}

}  // namespace

RendezvousOptions rendezvous_options(const RunOptions& options) {
  return {.min_nodes = options.nnodes_min,
          .max_nodes = options.nnodes_max,
          .max_restarts = options.max_restarts,
          .join_timeout = options.timeout,
          .last_call = options.last_call_timeout,
          .heartbeat_timeout = options.heartbeat_timeout,
          .stop_timeout = options.shutdown_timeout + kStopTime,
          .join_delay = std::min(options.last_call_timeout, kMaxJoinDelay),
          .restart_delay = options.restart_delay};
}

JobRendezvous::JobRendezvous(const RendezvousOptions& options, TimePoint now)
    : options_(options), generation_(options.first_generation - 1), restarts_(options.restarts), last_scan_(now) {
  gather(now);
}

std::vector<JobEvent> JobRendezvous::handle(const NodeEvent& event, TimePoint now) {
  if (event.kind == NodeEvent::Kind::kEnd) finish(event.outcome);  // also from a node that has not joined
  if (event.kind == NodeEvent::Kind::kMove) {
    move(event.root);
  } else if (event.kind == NodeEvent::Kind::kJoin) {
    join(event.node, now);
  } else if (const auto found = nodes_.find(event.id); event.kind == NodeEvent::Kind::kKilled) {
    if (found == nodes_.end()) return {};
    ++departed_;
    remove(event.id, fmt::format("lost {}: its agent was killed", name_of(found->second.info)), now);
  } else if (found != nodes_.end()) {
    on_event(found->second, event, now);
  } else if (event.kind == NodeEvent::Kind::kBye) {
    ++departed_;
  } else if (phase_ != Phase::kOver) {
    emit({JobEvent::Kind::kEvicted, generation_, event.id});
  }
  return std::exchange(events_, {});
}

void JobRendezvous::join(const NodeInfo& info, TimePoint now) {
  if (nodes_.contains(info.id)) return;
  const auto refuse = [&](std::string why) { emit({JobEvent::Kind::kRefused, generation_, info.id, std::move(why)}); };
  if (info.min_nodes != options_.min_nodes || info.max_nodes != options_.max_nodes)
    return refuse(
        fmt::format("this node was started with --nnodes {}, but the job's root with --nnodes {}; give all "
                    "nodes the same",
                    range({info.min_nodes, info.max_nodes}), range(options_)));
  if (info.max_restarts != options_.max_restarts)
    return refuse(fmt::format(
        "this node was started with --max-restarts {}, but the job's root with --max-restarts {}; it counts "
        "for the whole job, so give all nodes the same",
        info.max_restarts, options_.max_restarts));
  if (info.nproc > INT_MAX / options_.max_nodes)
    return refuse(fmt::format("{} workers on each of {} nodes are too many", info.nproc, options_.max_nodes));
  Node node{info, now, arrivals_++};
  const auto holder = std::ranges::find_if(nodes_, [&](const auto& entry) {
    return info.wanted && entry.second.info.wanted == info.wanted && entry.second.state != State::kDuplicate;
  });
  const bool spares_help = elastic() || options_.max_restarts > 0;
  if (holder != nodes_.end() && phase_ != Phase::kOver) {
    // This agent may replace a dead agent. It waits: a heartbeat of the other agent shows that this one is a duplicate.
    node.state = State::kDuplicate;
    node.duplicate_of = holder->first;
    ++duplicates_;
  } else if (is_full() && !spares_help && phase_ != Phase::kOver) {
    return refuse(fmt::format("all {} nodes of the job have joined already", options_.max_nodes));
  }
  nodes_.emplace(info.id, std::move(node));
  last_progress_.clear();  // sends the progress to this node, too
  expected_ = std::max(expected_, info.last_nnodes - 1);
  if (phase_ == Phase::kOver) return emit({JobEvent::Kind::kOutcome, generation_, info.id, "", outcome_});
  if (phase_ == Phase::kMoved) return emit({JobEvent::Kind::kMoved, generation_, info.id, next_root_});
  if (phase_ == Phase::kRunning && has_room()) {
    join_deadline_ = std::min(join_deadline_, is_full() ? now : now + options_.join_delay);
    admit(now);
  }
  start_when_complete(now);
}

void JobRendezvous::on_event(Node& node, const NodeEvent& event, TimePoint now) {
  node.last_heard = now;
  if (duplicates_ > 0) settle_duplicates(event.id, /*holder_lives=*/true, now);
  const bool current = event.generation == generation_ && (node.state == State::kRunning || node.state == State::kDone);
  switch (event.kind) {
    case NodeEvent::Kind::kDone:
      if (!current || phase_ == Phase::kOver) break;
      set_state(node, State::kDone);
      if (phase_ == Phase::kRunning && running_ == 0) finish({});
      break;
    case NodeEvent::Kind::kFailed:
      if (current) failed(event, now);
      break;
    case NodeEvent::Kind::kStopped:
      if (current && phase_ == Phase::kStopping && !node.leaving) set_state(node, State::kWaiting);
      continue_when_stopped(now);
      break;
    case NodeEvent::Kind::kLeave:
      leave(node, event, now);
      break;
    case NodeEvent::Kind::kBye:
      ++departed_;
      remove(event.id, name_of(node.info) + " has left the job", now);
      break;
    default:
      break;  // kAlive; handle() has handled the other kinds
  }
}

void JobRendezvous::failed(const NodeEvent& event, TimePoint now) {
  if (phase_ != Phase::kRunning) return;
  if (!elastic() && restarts_ >= options_.max_restarts) return finish(event.outcome);
  failure_ = event.outcome;
  stop(event.outcome.report, now);
}

void JobRendezvous::leave(Node& node, const NodeEvent& event, TimePoint now) {
  if (phase_ == Phase::kOver) return;
  node.leaving = true;  // no later generation includes this node; its kBye will follow
  const auto stays = [](const auto& entry) { return !entry.second.leaving && entry.second.state != State::kDuplicate; };
  if (phase_ == Phase::kMoved) return;
  if (!elastic() || std::ranges::count_if(nodes_, stays) < options_.min_nodes) return finish(event.outcome);
  if (phase_ != Phase::kRunning || node.state == State::kWaiting) return;
  membership_changed_ = true;
  stop(event.outcome.report, now);
}

// An elastic job continues if enough nodes are left. Another job waits for a replacement if restarts are left.
void JobRendezvous::remove(const std::string& id, const std::string& why, TimePoint now) {
  const auto found = nodes_.find(id);
  const bool member = found->second.state == State::kRunning || found->second.state == State::kDone;
  set_state(found->second, State::kWaiting);
  nodes_.erase(found);
  settle_duplicates(id, /*holder_lives=*/false, now);
  if (!member || phase_ == Phase::kGathering || phase_ >= Phase::kMoved) return;
  membership_changed_ = true;
  if (phase_ == Phase::kStopping) return continue_when_stopped(now);
  if (!elastic() && restarts_ >= options_.max_restarts) return finish({1, why});
  if (!elastic()) failure_ = {1, why};
  stop(why, now);
}

void JobRendezvous::move(const std::string& next_root) {
  if (phase_ >= Phase::kMoved) return;
  phase_ = Phase::kMoved;
  next_root_ = next_root;
  emit({JobEvent::Kind::kMoved, generation_, "", next_root});
}

bool JobRendezvous::all_left() const {
  if (phase_ == Phase::kOver) return nodes_.empty();
  return phase_ == Phase::kMoved && std::ranges::all_of(nodes_, [](const auto& entry) { return entry.second.leaving; });
}

void JobRendezvous::settle_duplicates(const std::string& holder, bool holder_lives, TimePoint now) {
  for (auto it = nodes_.begin(); it != nodes_.end();) {
    auto& [id, node] = *it++;
    if (node.state != State::kDuplicate || node.duplicate_of != holder) continue;
    set_state(node, State::kWaiting);
    if (!holder_lives) continue;
    emit({JobEvent::Kind::kRefused, generation_, id,
          fmt::format("node rank {} is taken by {}; give each node its own --node-rank", *node.info.wanted,
                      name_of(nodes_.at(holder).info))});
    nodes_.erase(std::prev(it));
  }
  if (!holder_lives) start_when_complete(now);
}

// True if a waiting node fits into the generation.
bool JobRendezvous::has_room() const {
  const int members = static_cast<int>(assignments_.size());
  return members < options_.max_nodes && eligible() > members;
}

// Ends the generation when the nodes that joined it have waited long enough.
void JobRendezvous::admit(TimePoint now) {
  if (phase_ != Phase::kRunning || now < join_deadline_) return;
  join_deadline_ = {INT64_MAX};
  if (!has_room()) return;  // the nodes have left again
  std::vector<std::string> names;
  for (const auto& [id, node] : nodes_)
    if (node.state == State::kWaiting && !node.leaving) names.push_back(name_of(node.info));
  if (names.empty()) return;
  stop(names.size() == 1 ? names.front() + " joins the job" : fmt::format("{} nodes join the job", names.size()), now);
}

void JobRendezvous::stop(std::string why, TimePoint now) {
  if (now - began_at_ >= kQuick) {
    quick_failures_ = 0;
  } else if (failure_.status != 0) {
    ++quick_failures_;
  }
  phase_ = Phase::kStopping;
  stop_deadline_ = now + options_.stop_timeout;
  emit({JobEvent::Kind::kStop, generation_, "", std::move(why)});
  continue_when_stopped(now);
}

void JobRendezvous::continue_when_stopped(TimePoint now) {
  if (phase_ != Phase::kStopping || busy_ > 0) return;
  const bool failure = failure_.status != 0 && !(elastic() && membership_changed_);
  if (failure && restarts_ >= options_.max_restarts) return finish(failure_);
  if (failure) ++restarts_;
  const Duration pause = failure ? pause_before_restart() : Duration::zero();
  gather(now, pause);
  if (pause > Duration::zero())
    emit({JobEvent::Kind::kProgress, generation_, "",
          fmt::format("{} failures in a row: restarting in {:g} s", quick_failures_, seconds(pause))});
  start_when_complete(now);
}

// Doubles with each failure in a row.
Duration JobRendezvous::pause_before_restart() const {
  Duration pause = quick_failures_ > 1 ? kFirstPause : Duration::zero();
  for (int i = 2; i < quick_failures_ && pause < options_.restart_delay; ++i) pause *= 2;
  return std::min(pause, options_.restart_delay);
}

void JobRendezvous::gather(TimePoint now, Duration pause) {
  phase_ = Phase::kGathering;
  restart_at_ = now + pause;
  if (pause > Duration::zero()) last_call_ = restart_at_;
  failure_ = {};
  membership_changed_ = false;
  gather_deadline_ = restart_at_ + options_.join_timeout;
  next_progress_ = restart_at_ + kProgressInterval;
  last_progress_.clear();
}

void JobRendezvous::start_when_complete(TimePoint now) {
  const int there = eligible();
  if (phase_ != Phase::kGathering || now < restart_at_) return;
  if (there < options_.min_nodes) {
    last_call_ = {INT64_MAX};  // the last call begins when there are enough nodes
    return;
  }
  // The nodes that are left after a generation start the next one at once. Other nodes join later.
  const bool successor = options_.first_generation > 0;
  const bool survivors = began_ || (successor && there >= expected_);
  if (last_call_.ns == INT64_MAX) last_call_ = now + options_.last_call;
  if (is_full() || survivors || now >= last_call_) start(now);
}

void JobRendezvous::start(TimePoint now) {
  phase_ = Phase::kRunning;
  began_ = true;
  began_at_ = now;
  join_deadline_ = {INT64_MAX};
  ++generation_;
  assign(choose());
  const int workers = assignments_.front().second.placement.world_size;
  std::string text = fmt::format("{} {}, {} {}", assignments_.size(), assignments_.size() == 1 ? "node" : "nodes",
                                 workers, workers == 1 ? "worker" : "workers");
  if (options_.max_restarts > 0) text += fmt::format(", restart {} of {}", restarts_, options_.max_restarts);
  emit({JobEvent::Kind::kStart, generation_, "", std::move(text)});
}

// Returns at most max_nodes nodes, in the order of their new ranks.
std::vector<JobRendezvous::Node*> JobRendezvous::choose() {
  std::vector<Node*> chosen;
  for (auto& [id, node] : nodes_)
    if (node.state == State::kWaiting) chosen.push_back(&node);
  // Nodes that ask for a rank come first, then nodes that had a rank, then the others by arrival.
  const auto priority = [](const Node* node) {
    return std::tuple(!node->info.wanted, node->info.last_rank < 0, node->info.last_rank, node->arrival);
  };
  std::sort(chosen.begin(), chosen.end(), [&](auto* a, auto* b) { return priority(a) < priority(b); });
  chosen.resize(std::min(chosen.size(), static_cast<size_t>(options_.max_nodes)));
  std::vector<Node*> slots(static_cast<size_t>(options_.max_nodes), nullptr);
  size_t lowest = 0;
  for (Node* node : chosen) {
    const int preferred = node->info.wanted.value_or(node->info.last_rank);
    auto slot = static_cast<size_t>(std::max(preferred, 0));
    if (preferred < 0 || slot >= slots.size() || slots[slot] != nullptr) {
      while (slots[lowest] != nullptr) ++lowest;
      slot = lowest;
    }
    slots[slot] = node;
  }
  std::erase(slots, nullptr);
  return slots;
}

void JobRendezvous::assign(const std::vector<Node*>& chosen) {
  assignments_.clear();
  std::map<std::string, int> roles;
  int world = 0;
  for (Node* node : chosen) {
    NodeInfo& info = node->info;
    info.last_rank = static_cast<int>(assignments_.size());
    info.last_nnodes = static_cast<int>(chosen.size());
    const Placement placement{.node_rank = info.last_rank,
                              .nnodes = info.last_nnodes,
                              .nproc = info.nproc,
                              .first_rank = world,
                              .first_role_rank = roles[info.role]};
    world += info.nproc;
    roles[info.role] += info.nproc;
    set_state(*node, State::kRunning);
    assignments_.emplace_back(info.id, Assignment{placement, generation_, restarts_});
  }
  for (size_t i = 0; i < chosen.size(); ++i) {
    assignments_[i].second.placement.world_size = world;
    assignments_[i].second.placement.role_world_size = roles[chosen[i]->info.role];
    assignments_[i].second.node0_addr = chosen.front()->info.address;
  }
}

void JobRendezvous::finish(Outcome outcome) {
  if (phase_ == Phase::kOver) return;
  phase_ = Phase::kOver;
  outcome_ = std::move(outcome);
  emit({JobEvent::Kind::kOutcome, generation_, "", "", outcome_});
}

std::vector<JobEvent> JobRendezvous::tick(TimePoint now) {
  check_heartbeats(now);
  admit(now);
  if (phase_ == Phase::kGathering) {
    start_when_complete(now);
    if (phase_ == Phase::kGathering && now >= gather_deadline_) fail_gathering();
  }
  if (phase_ == Phase::kGathering && now >= next_progress_) {
    next_progress_ = now + kProgressInterval;
    if (std::string text = progress(); text != last_progress_ || now >= repeat_progress_) {
      repeat_progress_ = now + kProgressRepeat;
      last_progress_ = text;
      emit({JobEvent::Kind::kProgress, generation_, "", std::move(text)});
    }
  }
  return std::exchange(events_, {});
}

TimePoint JobRendezvous::next_tick() const {
  TimePoint next = next_scan();
  if (phase_ == Phase::kRunning) next = std::min(next, join_deadline_);
  if (phase_ == Phase::kGathering) next = std::min({next, gather_deadline_, last_call_, next_progress_});
  return next;
}

void JobRendezvous::check_heartbeats(TimePoint now) {
  if (now < next_scan()) return;
  // If the root itself was paused, it received no heartbeats. This is no reason to treat a node as lost.
  const Duration own_pause = now - next_scan();
  last_scan_ = now;
  const bool late = phase_ == Phase::kStopping && now >= stop_deadline_;
  std::map<std::string, std::string> lost;
  for (auto& [id, node] : nodes_) {
    if (own_pause > options_.heartbeat_timeout / 5) node.last_heard = node.last_heard + own_pause;
    const bool busy = node.state == State::kRunning || node.state == State::kDone;
    if (now - node.last_heard >= options_.heartbeat_timeout) {
      lost[id] =
          fmt::format("lost {}: no heartbeat for {:g} s", name_of(node.info), seconds(options_.heartbeat_timeout));
    } else if (late && busy) {
      lost[id] =
          fmt::format("{} did not end its workers within {:g} s", name_of(node.info), seconds(options_.stop_timeout));
      emit({JobEvent::Kind::kRefused, generation_, id, lost[id]});
    }
  }
  for (const auto& [id, why] : lost) {
    ++departed_;
    if (nodes_.contains(id)) remove(id, why, now);
  }
}

std::vector<int> JobRendezvous::missing_ranks() const {
  std::set<int> there;
  for (const auto& [id, node] : nodes_) {
    const int rank = node.info.wanted.value_or(node.info.last_rank);
    if (rank < 0) return {};  // its rank is not known
    there.insert(rank);
  }
  std::vector<int> missing;
  for (int rank = 0; rank < options_.max_nodes && missing.size() < kMaxNamed; ++rank)
    if (!there.contains(rank)) missing.push_back(rank);
  return missing;
}

std::string JobRendezvous::progress() const {
  const int there = eligible();
  if (elastic() && there >= options_.min_nodes) {
    const int spare = there - options_.max_nodes;
    return fmt::format("{} of at most {} nodes are here{}", std::min(there, options_.max_nodes), options_.max_nodes,
                       spare < 0    ? "; waiting for more"
                       : spare == 0 ? ""
                                    : fmt::format(", and {} spare", spare));
  }
  std::string text = fmt::format("{} of {}{} nodes are here", there, elastic() ? "at least " : "", options_.min_nodes);
  if (const auto missing = missing_ranks(); !elastic() && !missing.empty()) {
    text += "; missing: " + rank_list(missing);
    if (missing.size() == kMaxNamed) text += ", ...";
  }
  return text;
}

void JobRendezvous::fail_gathering() {
  const auto missing = missing_ranks();
  std::string what;
  if (elastic()) {
    what =
        fmt::format("of at least {} nodes (--nnodes {}) only {} came", options_.min_nodes, range(options_), eligible());
  } else if (missing.empty()) {
    what = fmt::format("of {} nodes only {} came", options_.max_nodes, eligible());
  } else {
    what = fmt::format("of {} nodes, {} {} did not come", options_.max_nodes, missing.size() == 1 ? "node" : "nodes",
                       rank_list(missing));
  }
  finish({1, fmt::format("{} within {:g} s; start `muster run` there, or give a longer --timeout", what,
                         seconds(options_.join_timeout))});
}

void JobRendezvous::set_state(Node& node, State state) {
  const auto count = [&](int sign) {
    duplicates_ += node.state == State::kDuplicate ? sign : 0;
    running_ += node.state == State::kRunning ? sign : 0;
    busy_ += node.state == State::kRunning || node.state == State::kDone ? sign : 0;
  };
  count(-1);
  node.state = state;
  count(+1);
}

std::vector<JobRendezvous::NodeView> JobRendezvous::nodes() const {
  static constexpr const char* kNames[] = {"waiting", "waiting", "running", "done"};
  std::vector<NodeView> views;
  for (const auto& [id, node] : nodes_) {
    const bool busy = node.state == State::kRunning || node.state == State::kDone;
    views.push_back(
        {node.info, busy ? node.info.last_rank : -1, kNames[static_cast<int>(node.state)], node.last_heard});
  }
  return views;
}

}  // namespace muster
