#include "muster/group/linker.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/transport/shm/shm_link.h"

namespace muster {

Linker::Linker(Loop& loop, LinkIdentity identity)
    : loop_(loop), identity_(std::move(identity)), links_(identity_.size), dials_(identity_.size) {}

Result<std::string> Linker::listen(const Address& address, Transport transport) {
  const auto listen = transport == Transport::kShm ? listen_shm_links : listen_links;
  MUSTER_ASSIGN(auto listener,
                listen(loop_, address, identity_, [this](std::unique_ptr<Link> link) { adopt(std::move(link)); }));
  listeners_.push_back(std::move(listener));
  return listeners_.back()->address();
}

void Linker::adopt(std::unique_ptr<Link> link) {
  const Rank rank = link->peer().rank;
  if (links_[rank]) {
    link->close(Error{ErrorCode::kAlreadyExists, fmt::format("rank {} is linked already", rank), rank, {}});
    return;
  }
  links_[rank] = std::move(link);
  if (handler_) handler_(rank, *links_[rank]);
}

void Linker::dial(Rank rank, const Deadline& deadline) {
  const auto address = Address::parse(places_[rank].address);
  if (!address) {
    dial_error_ = address.error();
    return;
  }
  const auto connect = places_[rank].transport == Transport::kShm ? connect_shm_link : connect_link;
  dials_[rank] = connect(loop_, *address, identity_, rank, deadline, [this, rank](Result<std::unique_ptr<Link>> link) {
    if (link) return adopt(std::move(*link));
    if (!dial_error_) dial_error_ = link.error().in("linking with " + places_[rank].who);
  });
}

Result<> Linker::link_with(const std::vector<Rank>& ranks, const Deadline& deadline,
                           const std::function<std::optional<Error>()>& interrupted) {
  const auto linked = [&] {
    return std::all_of(ranks.begin(), ranks.end(), [&](Rank r) { return links_[r] != nullptr; });
  };
  if (linked()) return {};
  for (const Rank rank : ranks) {
    if (rank < identity_.rank && !links_[rank] && !dials_[rank]) dial(rank, deadline);
  }
  std::optional<Error> error;
  const auto over = [&] {
    if (!error) error = interrupted();
    return error || dial_error_ || linked();
  };
  const auto waited = loop_.run_until(over, deadline);
  if (error) return tl::unexpected(*error);
  if (dial_error_) return tl::unexpected(*dial_error_);
  for (const Rank rank : ranks) dials_[rank].reset();
  if (waited) return {};
  return tl::unexpected(missing(ranks));
}

Error Linker::missing(const std::vector<Rank>& ranks) const {
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
