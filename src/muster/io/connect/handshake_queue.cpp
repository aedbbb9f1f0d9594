#include "muster/io/connect/handshake_queue.h"

#include <netinet/in.h>

#include <algorithm>

namespace muster {
namespace {

std::string bytes_of(const void* data, size_t count) { return {static_cast<const char*>(data), count}; }

}  // namespace

std::string network_of(const Address& peer) {
  if (peer.family() == AF_INET) {
    return bytes_of(&reinterpret_cast<const sockaddr_in*>(peer.raw())->sin_addr, sizeof(in_addr));
  }
  if (peer.family() != AF_INET6) return {};
  const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(peer.raw())->sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&address)) return bytes_of(address.s6_addr + 12, sizeof(in_addr));
  const size_t prefix = IN6_IS_ADDR_LINKLOCAL(&address) ? sizeof address : sizeof address / 2;
  return bytes_of(&address, prefix);
}

void HandshakeQueue::add(int id, const std::string& network, TimePoint now) {
  const auto [found, fresh] = networks_.try_emplace(network);
  ++found->second.count;
  if (fresh) found->second.has_members = members_.contains(network);
  entries_[id] = {&found->first, &found->second, now, 0, silent_.insert(silent_.end(), id)};
}

void HandshakeQueue::on_bytes(int id, TimePoint now) {
  Entry& entry = entries_.at(id);
  if (entry.steps == kMaxSteps) return;
  begun_.splice(begun_.end(), entry.steps == 0 ? silent_ : begun_, entry.position);
  entry.since = now;
  ++entry.steps;
}

void HandshakeQueue::remove(int id) {
  const auto found = entries_.find(id);
  Entry& entry = found->second;
  (entry.steps == 0 ? silent_ : begun_).erase(entry.position);
  if (--entry.network->count == 0) networks_.erase(networks_.find(*entry.name));
  entries_.erase(found);
}

void HandshakeQueue::on_authenticated(int id) {
  Entry& entry = entries_.at(id);
  if (!entry.network->has_members && members_.size() < kMaxMembers) {
    entry.network->has_members = true;
    members_.insert(*entry.name);
  }
  remove(id);
}

int64_t HandshakeQueue::excess(const Network& network) const {
  return static_cast<int64_t>(network.count) - static_cast<int64_t>(network.has_members ? room_ / 2 : 0);
}

std::optional<HandshakeQueue::Candidate> HandshakeQueue::oldest(const Order& order, Duration grace,
                                                                int64_t wanted) const {
  for (const int id : order) {
    const Entry& entry = entries_.at(id);
    if (excess(*entry.network) == wanted) return Candidate{id, entry.since + grace};
  }
  return std::nullopt;
}

std::optional<HandshakeQueue::Candidate> HandshakeQueue::next() const {
  int64_t most = INT64_MIN;
  for (const auto& [name, network] : networks_) most = std::max(most, excess(network));
  const auto silent = oldest(silent_, kSilentGrace, most), begun = oldest(begun_, kStepGrace, most);
  if (!silent || !begun) return silent ? silent : begun;
  return silent->due <= begun->due ? silent : begun;
}

}  // namespace muster
