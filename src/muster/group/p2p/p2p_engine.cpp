// Operations, links and failures; who drives the loop is in messenger_progress.cpp.
#include "muster/group/p2p/p2p_engine.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/group/shutdown_errors.h"
#include "muster/transport/shm/shm_link.h"

namespace muster {
namespace {

/// A receive that has waited for so long looks whether its sender is there at all.
constexpr Duration kProbeAfter = 100ms;
/// More ranks than these are not probed for a receive from any of them.
constexpr size_t kMaxProbes = 32;
/// The messages to a peer bring their own deadlines; the link may take its time.
constexpr Duration kDialTime = std::chrono::hours(24);

/// `self`, who is one end of a lane.
LinkIdentity at(const Lane& lane, LinkIdentity self) {
  self.lane = lane;
  return self;
}

}  // namespace

Result<std::shared_ptr<P2pEngine>> P2pEngine::create(LinkIdentity self, int tcp_streams) {
  self.retry_refused = false;
  std::shared_ptr<P2pEngine> p2p(new P2pEngine(std::move(self), tcp_streams));
  MUSTER_ASSIGN(p2p->loop_, Loop::create());
  return p2p;
}

P2pEngine::~P2pEngine() { close(); }

Result<std::string> P2pEngine::listen(const Address& address, Transport transport) {
  const auto listen = transport == Transport::kShm ? listen_shm_links : listen_links;
  MUSTER_ASSIGN(auto listener, listen(*loop_, address, at({0, lanes(transport)}, self_),
                                      [this](std::unique_ptr<Link> link) { adopt(std::move(link)); }));
  listeners_.push_back(std::move(listener));
  return listeners_.back()->address();
}

void P2pEngine::begin(std::vector<Place> places) {
  const std::lock_guard lock(mutex_);
  places_ = std::move(places);
}

void P2pEngine::on_failure(FailureHandler handler) {
  const std::lock_guard lock(mutex_);
  on_failure_ = std::move(handler);
}

// ---- operations

Work P2pEngine::send(BufferView data, Rank to, uint32_t tag, const CallOptions& options) {
  Lock lock(mutex_);
  auto operation = begin_operation(false, std::move(data), to, tag, options);
  if (!operation) return Work(tl::unexpected(operation.error()));
  channel_to(to).send(*operation);
  return finish_call(lock, *operation, options);
}

Work P2pEngine::receive(BufferView data, Rank from, uint32_t tag, const CallOptions& options) {
  Lock lock(mutex_);
  if (!dead_) loop_->run_pollers();  // the message may be there
  auto operation = begin_operation(true, std::move(data), from, tag, options);
  if (!operation) {
    call_back(lock);  // others' messages may have been there
    return Work(tl::unexpected(operation.error()));
  }
  if (const UnexpectedPtr message = matcher_.post(from, tag, *operation)) {
    message->channel->deliver(*message, *operation);
  } else if (const auto why = receive_failure(from)) {
    matcher_.withdraw(from, tag, *operation);
    finish(*operation, tl::unexpected(*why));
  } else {
    probe_later(from);
  }
  return finish_call(lock, *operation, options);
}

Result<MessagePtr> P2pEngine::begin_operation(bool receives, BufferView data, Rank peer, uint32_t tag,
                                              const CallOptions& options) {
  auto operation = std::make_shared<MessageOperation>();
  operation->receives = receives;
  operation->peer = peer;
  operation->tag = tag;
  operation->data = std::move(data);
  const bool any = receives && peer == kAnyRank && self_.size > 1;
  if (!any && (peer < 0 || peer >= self_.size)) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: the group's ranks are 0 to {}", operation->to_string(), self_.size - 1));
  }
  if (peer == self_.rank) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: a rank has no messages for itself; copy the tensor", operation->to_string()));
  }
  if (dead_) return tl::unexpected(dead_->in(operation->to_string()));
  if (!receives) {
    if (const auto why = send_failure(peer)) return tl::unexpected(why->in(operation->to_string()));
  }
  operation->deadline = Deadline::after(options.timeout);
  operation->driver = shared_from_this();
  operation->place = pending_.size();
  pending_.push_back(operation);
  earliest_ = std::min(earliest_, operation->deadline.when());
  return operation;
}

Work P2pEngine::finish_call(Lock& lock, const MessagePtr& operation, const CallOptions& options) {
  if (!options.async) {
    wait_until(
        lock, [&] { return operation->over; }, Deadline::never());
  }
  if (has_work()) wake_thread();
  call_back(lock);
  if (operation->over && !operation->receives && operation->result) return Work(Result<>());
  return Work(operation);
}

void P2pEngine::finish(const MessagePtr& operation, Result<> result) {
  if (operation->over) return;
  operation->over = true;
  pending_.back()->place = operation->place;
  std::swap(pending_[operation->place], pending_.back());
  pending_.pop_back();
  if (pending_.empty()) earliest_ = TimePoint{INT64_MAX};
  if (!result) result = tl::unexpected(result.error().in(operation->to_string()));
  auto callbacks = operation->finish(result);
  for (auto& callback : callbacks) {
    callbacks_.push_back([callback = std::move(callback), result] { callback(result); });
  }
  if (waiting_ > 0) changed_.notify_all();
}

std::optional<Error> P2pEngine::send_failure(Rank to) const {
  if (dead_) return dead_;
  const auto gone = gone_.find(to);
  return gone == gone_.end() ? std::nullopt : std::optional(gone->second);
}

std::optional<Error> P2pEngine::receive_failure(Rank from) const {
  if (dead_) return dead_;
  if (from != kAnyRank) return drained_.contains(from) ? send_failure(from) : std::nullopt;
  if (static_cast<int>(drained_.size()) < self_.size - 1) return std::nullopt;
  return Error{ErrorCode::kLeft, "all other ranks have left the group", kNoRank, {}};
}

// ---- links

OutgoingMessages& P2pEngine::channel_to(Rank rank) {
  Outgoing& outgoing = outgoing_[rank];
  if (!outgoing.channel) {
    outgoing.channel = std::make_unique<OutgoingMessages>(static_cast<P2pDelegate&>(*this), rank);
    const int count = lanes(places_[rank].transport);
    outgoing.dials.resize(count);
    for (int lane = 0; lane < count && !dead_; ++lane) dial(rank, lane);
    watch_process(rank);
  }
  return *outgoing.channel;
}

void P2pEngine::dial(Rank rank, int lane) {
  const Place& place = places_[rank];
  const auto address = Address::parse(place.address);
  if (!address) return die(address.error());
  const auto connect = place.transport == Transport::kShm ? connect_shm_link : connect_link;
  const auto done = [this, rank, lane](Result<std::unique_ptr<Link>> link) { dialled(rank, lane, std::move(link)); };
  outgoing_[rank].dials[lane] =
      connect(*loop_, *address, at({lane, lanes(place.transport)}, self_), rank, Deadline::after(kDialTime), done);
}

void P2pEngine::dialled(Rank rank, int lane, Result<std::unique_ptr<Link>> link) {
  if (dead_) return;
  Outgoing& outgoing = outgoing_[rank];
  outgoing.dials[lane].reset();
  if (link) {
    const Lane place{lane, lanes(places_[rank].transport)};
    auto whole = outgoing.lanes.add(std::move(*link), place, [this, rank](const Error& why) { lost(rank, why); });
    if (whole) outgoing.channel->open(std::move(whole));
    return;
  }
  Error error = std::move(link).error();
  error.rank = rank;
  if (error.code == ErrorCode::kUnavailable) {
    // It listened when the group was formed.
    error.message = fmt::format("{} has left the group, or died: {}", places_[rank].member.to_string(), error.message);
    return left(rank, error);
  }
  if (error.code != ErrorCode::kPeerLost && error.code != ErrorCode::kTimeout) return die(error);
  loop_->after(kProbeAfter, [this, rank, lane] {
    if (!dead_ && !gone_.contains(rank)) dial(rank, lane);
  });
}

void P2pEngine::adopt(std::unique_ptr<Link> link) {
  const Rank rank = link->peer().rank;
  if (dead_) return link->close(*dead_);
  if (incoming_.contains(rank)) {
    return link->close(Error{ErrorCode::kAlreadyExists, fmt::format("rank {} sends already", rank), rank, {}});
  }
  watch_process(rank);
  const Lane lane = link->peer().lane;
  auto whole = arriving_[rank].add(std::move(link), lane, [this, rank](const Error& why) { lost(rank, why); });
  if (!whole) return;
  arriving_.erase(rank);
  auto& channel = incoming_[rank];
  channel = std::make_unique<IncomingMessages>(static_cast<P2pDelegate&>(*this), matcher_, rank);
  channel->open(std::move(whole));
}

void P2pEngine::watch_process(Rank rank) {
  if (processes_.contains(rank)) return;
  const RankInfo& member = places_[rank].member;
  Fd process = muster::watch_process(*loop_, places_[self_.rank].member, member, [this, rank] {
    if (dead_ || gone_.contains(rank)) return;
    die(Error{ErrorCode::kPeerLost, places_[rank].member.to_string() + " died", rank, {}});
  });
  if (process) processes_[rank] = std::move(process);
}

void P2pEngine::probe_later(Rank rank) {
  if (probing_ || incoming_.contains(rank)) return;
  probing_ = true;
  loop_->after(kProbeAfter, [this] {
    probing_ = false;
    if (!dead_) probe();
  });
}

/// A link to the sender tells when it leaves, and refuses when it has.
void P2pEngine::probe() {
  std::set<Rank> awaited;
  for (const MessagePtr& operation : pending_) {
    if (!operation->receives || operation->matched) continue;
    if (operation->peer != kAnyRank) awaited.insert(operation->peer);
    for (Rank rank = 0; operation->peer == kAnyRank && rank < self_.size; ++rank) awaited.insert(rank);
  }
  awaited.erase(self_.rank);
  for (const Rank rank : awaited) {
    watch_process(rank);
    if (awaited.size() <= kMaxProbes && !incoming_.contains(rank) && !gone_.contains(rank)) (void)channel_to(rank);
  }
}

// ---- failures

void P2pEngine::ended(MessageChannel& channel, const Error& why) {
  if (dead_) return;
  const Rank rank = channel.peer();
  lost(rank, why);
  const auto incoming = incoming_.find(rank);
  if (!dead_ && incoming != incoming_.end() && incoming->second.get() == &channel) end_receives(rank);
}

/// A link, or one of its lanes, has ended.
void P2pEngine::lost(Rank rank, const Error& why) {
  if (dead_) return;
  why.code == ErrorCode::kLeft ? left(rank, why) : die(why);
}

/// What it has sent may still be on its way, or its link be in the hands of the listener. What goes to it ends: the
/// link first, for the memory of an operation that is over belongs to its caller.
void P2pEngine::left(Rank rank, const Error& why) {
  if (!gone_.emplace(rank, why).second) return;
  if (const auto found = outgoing_.find(rank); found != outgoing_.end()) {
    Outgoing& outgoing = found->second;
    for (auto& dial : outgoing.dials) dial.reset();
    outgoing.lanes.close(why);
    outgoing.channel->abandon(why);
  }
  const std::vector<MessagePtr> pending = pending_;
  for (const MessagePtr& operation : pending) {
    if (!operation->receives && operation->peer == rank) finish(operation, tl::unexpected(why));
  }
  loop_->after(kLastWords, [this, rank] {
    const auto incoming = incoming_.find(rank);
    if (!dead_ && (incoming == incoming_.end() || !incoming->second->is_open())) end_receives(rank);
  });
}

/// Nothing more comes from the rank.
void P2pEngine::end_receives(Rank rank) {
  drained_.insert(rank);
  matcher_.forget(rank, IncomingMessages::is_cut_off);
  const Error why = *receive_failure(rank);
  const auto nobody = receive_failure(kAnyRank);
  const std::vector<MessagePtr> pending = pending_;
  for (const MessagePtr& operation : pending) {
    if (!operation->receives) continue;
    const bool of_rank = operation->peer == rank || (operation->matched && operation->source == rank);
    if (!of_rank && !(operation->peer == kAnyRank && nobody)) continue;
    matcher_.withdraw(operation->peer, operation->tag, operation);
    finish(operation, tl::unexpected(of_rank ? why : *nobody));
  }
}

void P2pEngine::end_all(const Error& why, const Error& to_peers) {
  dead_ = why;
  // The links first: the memory of an operation that is over belongs to its caller.
  for (auto& [rank, outgoing] : outgoing_) {
    outgoing.channel->close(to_peers);
    outgoing.lanes.close(to_peers);
  }
  for (auto& [rank, lanes] : arriving_) lanes.close(to_peers);
  for (auto& [rank, channel] : incoming_) channel->close(to_peers);
  const std::vector<MessagePtr> pending = pending_;
  for (const MessagePtr& operation : pending) finish(operation, tl::unexpected(why));
  if (waiting_ > 0) changed_.notify_all();
}

void P2pEngine::die(const Error& why) {
  if (dead_) return;
  end_all(why, why);
  if (!on_failure_) return;
  // Before the callbacks of messages, which may wait for a collective that this ends.
  callbacks_.insert(callbacks_.begin(), [handler = std::move(on_failure_), why] { handler(why); });
  on_failure_ = nullptr;
}

void P2pEngine::abort(const Error& why) {
  Lock lock(mutex_);
  on_failure_ = nullptr;  // whoever aborts knows
  die(why);
  if (parked_) loop_->wake();
}

void P2pEngine::call_back() {
  Lock lock(mutex_);
  call_back(lock);
}

void P2pEngine::expire() {
  const TimePoint now = steady_clock().now();
  if (now < earliest_) return;
  const std::vector<MessagePtr> pending = pending_;
  for (const MessagePtr& operation : pending) {
    if (!operation->over && operation->deadline.when() <= now) time_out(operation);
  }
  earliest_ = TimePoint{INT64_MAX};
  for (const MessagePtr& operation : pending_) earliest_ = std::min(earliest_, operation->deadline.when());
}

void P2pEngine::time_out(const MessagePtr& operation) {
  const Rank rank = operation->peer == kAnyRank ? operation->source : operation->peer;
  const std::string who = rank == kNoRank ? "any rank" : places_[rank].member.to_string();
  if (operation->receives && matcher_.withdraw(operation->peer, operation->tag, operation)) {
    return finish(operation, fail(ErrorCode::kTimeout,
                                  fmt::format("nothing came in time from {} with tag {}", who, operation->tag), rank));
  }
  // Half a message is under way: the link is good for nothing any more.
  const char* what = operation->receives ? "did not send the whole message in time" : "did not receive it in time";
  die(Error{ErrorCode::kTimeout, fmt::format("{} {} (tag {})", who, what, operation->tag), rank,
            operation->to_string()});
}

// ---- the end

void P2pEngine::close() {
  Lock lock(mutex_);
  if (stopping_) return;
  const auto sent = [this] {
    return dead_ || (copies_ == 0 && std::all_of(pending_.begin(), pending_.end(),
                                                 [](const MessagePtr& operation) { return operation->receives; }));
  };
  wait_until(lock, sent, Deadline::after(kDrainTime));
  on_failure_ = nullptr;
  if (!dead_) {
    const std::string self =
        places_.empty() ? fmt::format("rank {}", self_.rank) : places_[self_.rank].member.to_string();
    end_all(was_shut_down(self_.group, self_.rank), has_left(self, self_.rank));
  }
  stopping_ = true;
  if (parked_) loop_->wake();
  work_.notify_all();
  call_back(lock);
  changed_.wait(lock, [this] { return !driving_ && waiting_ == 0 && calling_ == 0; });
  lock.unlock();
  if (thread_.joinable()) thread_.join();
  lock.lock();
  // The loop's callbacks refer to this.
  outgoing_.clear();
  incoming_.clear();
  arriving_.clear();
  listeners_.clear();
  loop_.reset();
}

}  // namespace muster
