#include "muster/group/engine/link_table.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/group/shutdown_errors.h"
#include "muster/transport/shm/shm_link.h"

namespace muster {

LinkTable::LinkTable(Loop& loop, LinkIdentity identity, int tcp_streams)
    : loop_(loop),
      identity_(std::move(identity)),
      tcp_streams_(tcp_streams),
      links_(identity_.size),
      lanes_(identity_.size),
      dials_(identity_.size) {}

LinkIdentity LinkTable::identity(Transport transport, int lane) const {
  LinkIdentity identity = identity_;
  identity.lane = {lane, transport == Transport::kTcp ? tcp_streams_ : 1};
  return identity;
}

Result<std::string> LinkTable::listen(const Address& address, Transport transport) {
  const auto listen = transport == Transport::kShm ? listen_shm_links : listen_links;
  MUSTER_ASSIGN(auto listener, listen(loop_, address, identity(transport), [this](std::unique_ptr<Link> link) {
                  const Lane lane = link->peer().lane;
                  adopt(std::move(link), lane);
                }));
  listeners_.push_back(std::move(listener));
  return listeners_.back()->address();
}

void LinkTable::adopt(std::unique_ptr<Link> link, const Lane& lane) {
  const Rank rank = link->peer().rank;
  if (links_[rank]) {
    return link->close(Error{ErrorCode::kAlreadyExists, fmt::format("rank {} is linked already", rank), rank, {}});
  }
  links_[rank] = lanes_[rank].add(std::move(link), lane, [this](const Error& why) {
    if (!had_formed(why) && !failure_) failure_ = why;
  });
  if (links_[rank] && handler_) handler_(rank, *links_[rank]);
}

void LinkTable::dial(Rank rank, const Deadline& deadline) {
  const auto address = Address::parse(places_[rank].address);
  if (!address) {
    failure_ = address.error();
    return;
  }
  const auto connect = places_[rank].transport == Transport::kShm ? connect_shm_link : connect_link;
  const int lanes = identity(places_[rank].transport).lane.count;
  for (int lane = 0; lane < lanes; ++lane) {
    const auto done = [this, rank, lane, lanes](Result<std::unique_ptr<Link>> link) {
      if (link) return adopt(std::move(*link), {lane, lanes});
      if (!failure_) failure_ = link.error().in("linking with " + places_[rank].who);
    };
    dials_[rank].push_back(connect(loop_, *address, identity(places_[rank].transport, lane), rank, deadline, done));
  }
}

Result<> LinkTable::link_with(const std::vector<Rank>& ranks, const Deadline& deadline,
                              const std::function<std::optional<Error>()>& interrupted) {
  const auto linked = [&] {
    return std::all_of(ranks.begin(), ranks.end(), [&](Rank r) { return links_[r] != nullptr; });
  };
  if (linked()) return {};
  for (const Rank rank : ranks) {
    if (rank < identity_.rank && !links_[rank] && dials_[rank].empty()) dial(rank, deadline);
  }
  std::optional<Error> error;
  const auto over = [&] {
    if (!error) error = interrupted();
    return error || failure_ || linked();
  };
  const auto waited = loop_.run_until(over, deadline);
  if (error) return tl::unexpected(*error);
  if (failure_) return tl::unexpected(*failure_);
  for (const Rank rank : ranks) dials_[rank].clear();
  if (waited) return {};
  return tl::unexpected(missing(ranks));
}

Error LinkTable::missing(const std::vector<Rank>& ranks) const {
  std::string names;
  Rank first = kNoRank;
  for (const Rank rank : ranks) {
    if (links_[rank]) continue;
    if (first == kNoRank) first = rank;
    names += (names.empty() ? "" : ", ") + places_[rank].who;
  }
  // Perhaps they did come, and could not prove themselves.
  std::string refusals;
  for (const auto& listener : listeners_) {
    if (!listener->last_refusal().empty()) refusals += "; meanwhile " + listener->last_refusal();
  }
  return Error{ErrorCode::kTimeout, "no link in time with " + names + refusals, first, {}};
}

}  // namespace muster
