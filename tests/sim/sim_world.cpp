#include "sim/sim_world.h"

#include "muster/base/check.h"
#include "sim/sim_link.h"

namespace muster::sim {

World::World(uint64_t seed, Faults faults) : random_(seed), faults_(faults) {
  MUSTER_CHECK(faults.drop >= 0 && faults.drop < 1, "a network that loses everything delivers nothing");
}

World::~World() {
  for (SimLink* link : links_) {
    if (link != nullptr) link->world_ = nullptr;
  }
}

Duration World::random_delay() {
  const auto low = static_cast<uint64_t>(faults_.min_delay.count());
  const auto high = static_cast<uint64_t>(faults_.max_delay.count());
  return Duration(static_cast<int64_t>(random_.between(low, std::max(low, high))));
}

Duration World::packet_delay() {
  Duration delay = random_delay();
  while (faults_.drop > 0 && random_.chance(faults_.drop)) {
    ++drops_;
    delay += faults_.retransmit_after;
  }
  return delay;
}

std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> World::connect(Rank a, Rank b) {
  const auto number = static_cast<uint32_t>(links_.size());
  auto first = std::make_unique<SimLink>(*this, number, a, b);
  auto second = std::make_unique<SimLink>(*this, number + 1, b, a);
  first->join(second.get());
  second->join(first.get());
  for (SimLink* link : {first.get(), second.get()}) {
    links_.push_back(link);
    links_of_[link->self()].push_back(link->number());
  }
  if (const auto found = partitions_.find(pair_of(a, b)); found != partitions_.end()) {
    schedule_partition(*first, found->second.number);
    schedule_partition(*second, found->second.number);
  }
  return {std::move(first), std::move(second)};
}

void World::schedule(TimePoint when, Kind kind, uint32_t link, uint64_t detail) {
  events_.push(Event{when, next_order_++, detail, link, kind});
}

void World::at(TimePoint when, std::function<void()> callback) {
  callbacks_[next_order_] = std::move(callback);
  schedule(when, Kind::kCallback, 0);
}

template <class Visitor>
void World::for_each_link(Rank rank, Visitor visit) {
  std::vector<uint32_t>& numbers = links_of_[rank];
  std::erase_if(numbers, [this](uint32_t number) { return links_[number] == nullptr; });
  for (const uint32_t number : numbers) visit(*links_[number]);
}

void World::crash(Rank rank) {
  const TimePoint noticed = now() + faults_.loss_detected_after;
  for_each_link(rank, [&](SimLink& link) {
    link.crash();
    if (link.other() != nullptr) schedule(noticed, Kind::kPeerCrashed, link.other()->number());
  });
  stopped_.erase(rank);
}

void World::resume(Rank rank) {
  const auto node = stopped_.extract(rank);
  if (node.empty()) return;
  for (const Event& event : node.mapped()) schedule(now(), event.kind, event.link, event.detail);
}

void World::partition(Rank a, Rank b) {
  const auto [entry, added] = partitions_.try_emplace(pair_of(a, b), Partition{next_order_, {}});
  if (!added) return;
  for_each_link(a, [&, number = entry->second.number](SimLink& link) {
    if (link.peer().rank != b) return;
    schedule_partition(link, number);
    if (link.other() != nullptr) schedule_partition(*link.other(), number);
  });
}

void World::schedule_partition(SimLink& link, uint64_t number) {
  schedule(now() + faults_.loss_detected_after, Kind::kPartitioned, link.number(), number);
}

void World::heal(Rank a, Rank b) {
  const auto node = partitions_.extract(pair_of(a, b));
  if (node.empty()) return;
  const TimePoint arrival = now() + random_delay();  // one time for all events, so that they keep their order
  for (const Event& event : node.mapped().held) schedule(arrival, event.kind, event.link, event.detail);
}

bool World::step() {
  if (events_.empty()) return false;
  const Event event = events_.top();
  events_.pop();
  advance_to(event.when);
  ++events_run_;
  if (event.kind == Kind::kCallback) {
    run_callback(event.order);
  } else if (SimLink* link = links_[event.link]; link != nullptr) {
    dispatch(event, *link);
  }
  return true;
}

void World::run_callback(uint64_t order) {
  const auto node = callbacks_.extract(order);
  node.mapped()();
}

void World::dispatch(const Event& event, SimLink& link) {
  if (const auto stopped = stopped_.find(link.self()); stopped != stopped_.end()) {
    stopped->second.push_back(event);
    return;
  }
  const auto partition =
      partitions_.empty() ? partitions_.end() : partitions_.find(pair_of(link.self(), link.peer().rank));
  const bool partitioned = partition != partitions_.end();
  switch (event.kind) {
    case Kind::kArrive:
    case Kind::kWindowUpdate:
    case Kind::kPing:
    case Kind::kPong:
    case Kind::kControl:
      if (partitioned) {
        partition->second.held.push_back(event);
      } else {
        link.on_event(event.kind);
      }
      break;
    case Kind::kPeerCrashed:
      link.on_peer_lost("crashed");
      break;
    case Kind::kPartitioned:
      if (partitioned && partition->second.number == event.detail) link.on_peer_lost("cannot be reached");
      break;
    case Kind::kCallback:
      break;
  }
}

Result<> World::run_until(const std::function<bool()>& done, const Deadline& deadline) {
  while (!done()) {
    if (events_.empty()) return fail(ErrorCode::kTimeout, "nothing is left to happen in the simulated world");
    if (events_.top().when > deadline.when()) {
      advance_to(deadline.when());
      return fail(ErrorCode::kTimeout, "the simulated deadline passed");
    }
    step();
  }
  return {};
}

uint64_t World::bytes_sent(Rank from) const {
  const auto found = bytes_sent_.find(from);
  return found == bytes_sent_.end() ? 0 : found->second;
}

}  // namespace muster::sim
