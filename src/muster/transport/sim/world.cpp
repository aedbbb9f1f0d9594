#include "muster/transport/sim/world.h"

#include "muster/transport/sim/network.h"

namespace muster::sim {

struct World::Impl {
  Network network;
};

World::World(uint64_t seed, Faults faults) : impl_(new Impl{Network(seed, faults)}) {}
World::~World() = default;

const Clock& World::clock() const { return impl_->network.clock(); }

std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> World::connect(Rank a, Rank b) {
  return impl_->network.connect(a, b);
}

void World::crash(Rank rank) { impl_->network.crash(rank); }
void World::stop(Rank rank) { impl_->network.stop(rank); }
void World::resume(Rank rank) { impl_->network.resume(rank); }
void World::partition(Rank a, Rank b) { impl_->network.partition(a, b); }
void World::heal(Rank a, Rank b) { impl_->network.heal(a, b); }
void World::at(TimePoint when, std::function<void()> callback) { impl_->network.at(when, std::move(callback)); }
bool World::step() { return impl_->network.step(); }
uint64_t World::events() const { return impl_->network.events(); }
uint64_t World::drops() const { return impl_->network.drops(); }
uint64_t World::bytes_sent(Rank from) const { return impl_->network.bytes_sent(from); }

Result<> World::run_until(const std::function<bool()>& done, const Deadline& deadline) {
  while (!done()) {
    const TimePoint* next = impl_->network.next_time();
    if (next == nullptr) return fail(ErrorCode::kTimeout, "nothing is left to happen in the simulated world");
    if (*next > deadline.when()) {
      impl_->network.advance_to(deadline.when());
      return fail(ErrorCode::kTimeout, "the simulated deadline passed");
    }
    step();
  }
  return {};
}

}  // namespace muster::sim
