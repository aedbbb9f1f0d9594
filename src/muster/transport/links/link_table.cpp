#include "muster/transport/links/link_table.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/transport/links/process_monitor.h"
#include "muster/transport/shm/shm_link.h"

namespace muster {
namespace {

constexpr Duration kRedialDelay = 100ms;

}  // namespace

LinkTable::LinkTable(Loop& loop, LinkIdentity identity, int tcp_streams)
    : loop_(loop), identity_(std::move(identity)), tcp_streams_(tcp_streams) {}

LinkIdentity LinkTable::identity(Transport transport, int subflow) const {
  LinkIdentity identity = identity_;
  identity.subflow = {subflow, transport == Transport::kTcp ? tcp_streams_ : 1};
  return identity;
}

void LinkTable::set_events(Events events) {
  events_ = std::move(events);
  for (const Side side : {Side::kDialed, Side::kAccepted}) {
    for (auto& [rank, entry] : entries(side)) {
      if (entry.link) report(rank, side, *entry.link);
    }
  }
}

Result<std::string> LinkTable::listen(const Address& address, Transport transport) {
  const auto listen = transport == Transport::kShm ? listen_shm_links : listen_links;
  MUSTER_ASSIGN(auto listener, listen(loop_, address, identity(transport),
                                      [this](std::unique_ptr<Link> link) { on_accepted(std::move(link)); }));
  listeners_.push_back(std::move(listener));
  return listeners_.back()->address();
}

void LinkTable::dial(Rank rank, const Deadline& deadline) {
  Entry& entry = dialed_[rank];
  if (closed_ || entry.link || !entry.dials.empty()) return;
  entry.dials.resize(identity(endpoint(rank).transport).subflow.count);
  // A failure may clear entry.dials during this loop, so the size is read again each time.
  for (int subflow = 0; subflow < std::ssize(entry.dials); ++subflow) dial_subflow(rank, subflow, deadline);
}

void LinkTable::dial_subflow(Rank rank, int subflow, const Deadline& deadline) {
  const Endpoint& peer = endpoint(rank);
  const auto address = Address::parse(peer.address);
  if (!address) return on_dialed(rank, subflow, deadline, tl::unexpected(address.error()));
  const auto connect = peer.transport == Transport::kShm ? connect_shm_link : connect_link;
  dialed_[rank].dials[subflow] = connect(loop_, *address, identity(peer.transport, subflow), rank, deadline,
                                         [this, rank, subflow, deadline](Result<std::unique_ptr<Link>> link) {
                                           on_dialed(rank, subflow, deadline, std::move(link));
                                         });
}

void LinkTable::on_dialed(Rank rank, int subflow, const Deadline& deadline, Result<std::unique_ptr<Link>> link) {
  dialed_[rank].dials[subflow].reset();
  if (closed_) {
    if (link) (*link)->close(*closed_);
    return;
  }
  if (link)
    return add_subflow(rank, Side::kDialed, std::move(*link), identity(endpoint(rank).transport, subflow).subflow);
  if (!events_.dial_failed) {
    if (!dial_failure_) dial_failure_ = link.error().in("linking with " + endpoint(rank).name);
    return;
  }
  if (!events_.dial_failed(rank, link.error())) return;
  loop_.after(kRedialDelay, [this, rank, subflow, deadline, alive = std::weak_ptr(dialed_[rank].alive)] {
    if (!closed_ && !alive.expired() && !dialed_[rank].dials.empty()) dial_subflow(rank, subflow, deadline);
  });
}

void LinkTable::on_accepted(std::unique_ptr<Link> link) {
  const Rank rank = link->peer().rank;
  const Subflow subflow = link->peer().subflow;
  if (closed_) return link->close(*closed_);
  if (this->link(rank, Side::kAccepted) != nullptr && events_.replaced) {
    events_.replaced(rank);
    accepted_.erase(rank);
  }
  if (this->link(rank, Side::kAccepted) != nullptr) {
    return link->close(Error{ErrorCode::kAlreadyExists, fmt::format("rank {} is linked already", rank), rank, {}});
  }
  add_subflow(rank, Side::kAccepted, std::move(link), subflow);
}

void LinkTable::add_subflow(Rank rank, Side side, std::unique_ptr<Link> link, const Subflow& subflow) {
  Entry& entry = entries(side)[rank];
  entry.link = entry.subflows.add(std::move(link), subflow,
                                  [this, rank, side](const Error& why) { report_lost(rank, side, why); });
  if (entry.link) report(rank, side, *entry.link);
}

void LinkTable::report(Rank rank, Side side, Link& link) {
  if (events_.linked) events_.linked(rank, side, link);
  link.on_close([this, rank, side](const Error& why) { report_lost(rank, side, why); });
}

void LinkTable::report_lost(Rank rank, Side side, const Error& why) {
  if (!closed_ && events_.lost) events_.lost(rank, side, why);
}

Result<> LinkTable::connect(const std::vector<Rank>& ranks, const Deadline& deadline,
                            const std::function<std::optional<Error>()>& interrupted) {
  const auto linked = [&] { return std::ranges::all_of(ranks, [this](Rank rank) { return link(rank) != nullptr; }); };
  if (linked()) return {};
  for (const Rank rank : ranks) {
    if (rank < identity_.rank) dial(rank, deadline);
  }
  std::optional<Error> error;
  const auto over = [&] {
    error = interrupted();
    if (!error) error = dial_failure_;
    return error || linked();
  };
  const auto waited = loop_.run_until(over, deadline);
  if (error) return tl::unexpected(*error);
  if (waited) return {};
  for (const Rank rank : ranks) {
    if (rank < identity_.rank && link(rank) == nullptr) dialed_[rank].dials.clear();
  }
  return tl::unexpected(missing(ranks));
}

Error LinkTable::missing(const std::vector<Rank>& ranks) const {
  std::string names;
  Rank first = kNoRank;
  for (const Rank rank : ranks) {
    if (link(rank) != nullptr) continue;
    if (first == kNoRank) first = rank;
    names += (names.empty() ? "" : ", ") + endpoint(rank).name;
  }
  // A missing rank may have dialed but failed the handshake, so the error also shows the last refusals.
  std::string refusals;
  for (const auto& listener : listeners_) {
    if (!listener->last_refusal().empty()) refusals += "; meanwhile " + listener->last_refusal();
  }
  return Error{ErrorCode::kTimeout, "no link in time with " + names + refusals, first, {}};
}

const LinkTable::Endpoint* LinkTable::find_endpoint(Rank rank) const {
  const auto found = endpoints_.find(rank);
  return found == endpoints_.end() ? nullptr : &found->second;
}

void LinkTable::stop_connecting() {
  listeners_.clear();
  for (auto& [rank, entry] : dialed_) entry.dials.clear();
}

Link* LinkTable::link(Rank rank, Side side) const {
  const Entries& all = side == Side::kDialed ? dialed_ : accepted_;
  const auto found = all.find(rank);
  return found == all.end() ? nullptr : found->second.link.get();
}

Link* LinkTable::link(Rank rank) const {
  Link* dialed = link(rank, Side::kDialed);
  return dialed != nullptr ? dialed : link(rank, Side::kAccepted);
}

void LinkTable::monitor_process(Rank rank) {
  if (closed_ || processes_.contains(rank)) return;
  const Endpoint& peer = endpoint(rank);
  Fd process = muster::monitor_process(loop_, endpoint(identity_.rank).process, peer.process, [this, rank] {
    if (!processes_.contains(rank)) return;  // forgotten, or closed
    if (events_.died) events_.died(rank, Error{ErrorCode::kPeerLost, endpoint(rank).name + " died", rank, {}});
  });
  if (process) processes_.emplace(rank, std::move(process));
}

void LinkTable::forget(Rank rank, Side side) {
  entries(side).erase(rank);
  if (rank == identity_.rank || dialed_.contains(rank) || accepted_.contains(rank)) return;
  endpoints_.erase(rank);
  const auto process = processes_.find(rank);
  if (process == processes_.end()) return;
  loop_.unwatch(process->second.get());
  processes_.erase(process);
}

void LinkTable::close_dialed(Rank rank, const Error& why) {
  const auto found = dialed_.find(rank);
  if (found == dialed_.end()) return;
  Entry& entry = found->second;
  entry.dials.clear();
  entry.subflows.close(why);
  if (entry.link) entry.link->close(why);
}

void LinkTable::close(const Error& why) {
  if (closed_) return;
  closed_ = why;
  for (const auto& [rank, process] : processes_) loop_.unwatch(process.get());
  processes_.clear();
  // Dials in progress continue, so that the peer learns the reason once it answers.
  for (const Side side : {Side::kDialed, Side::kAccepted}) {
    for (auto& [rank, entry] : entries(side)) {
      entry.subflows.close(why);
      if (entry.link) entry.link->close(why);
    }
  }
}

}  // namespace muster
