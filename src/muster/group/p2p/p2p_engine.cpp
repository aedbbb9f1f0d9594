#include "muster/group/p2p/p2p_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "muster/group/shutdown_errors.h"
#include "muster/transport/links/process_monitor.h"

namespace muster {
namespace {

/// After this time, a waiting receive checks that its sender still exists.
constexpr Duration kProbeAfter = 100ms;
/// Ranks are not dialed by a probe if receives wait for more ranks than this.
constexpr size_t kMaxProbes = 32;
/// The messages have their own deadlines, so the dial has practically none.
constexpr Duration kDialTime = std::chrono::hours(24);

}  // namespace

Result<std::shared_ptr<P2pEngine>> P2pEngine::create(LinkIdentity self, int tcp_streams) {
  MUSTER_ASSIGN(auto loop, Loop::create());
  // A refused connection is not retried: every rank listened when the group formed, so the rank has left or died.
  self.retry_refused = false;
  return std::shared_ptr<P2pEngine>(new P2pEngine(std::move(self), tcp_streams, std::move(loop)));
}

P2pEngine::P2pEngine(LinkIdentity self, int tcp_streams, std::unique_ptr<Loop> loop)
    : self_(std::move(self)), driver_(std::move(loop), *this, {}) {
  links_.emplace(driver_.loop(), self_, tcp_streams);
  links_->set_events({.linked = [this](Rank rank, LinkTable::Side side, Link& link) { on_linked(rank, side, link); },
                      .lost = [this](Rank rank, LinkTable::Side, const Error& why) { on_lost(rank, why); },
                      .dial_failed = [this](Rank rank, const Error& why) { return on_dial_failed(rank, why); },
                      .died = [this](Rank rank, const Error& why) { on_lost(rank, why); }});
}

P2pEngine::~P2pEngine() { close(); }

Result<std::string> P2pEngine::listen(const Address& address, Transport transport) {
  return links_->listen(address, transport);
}

void P2pEngine::begin(const std::vector<LinkTable::Endpoint>& endpoints) {
  const Lock lock = driver_.lock();
  for (Rank rank = 0; rank < std::ssize(endpoints); ++rank) links_->set_endpoint(rank, endpoints[rank]);
}

void P2pEngine::on_failure(FailureHandler handler) {
  const Lock lock = driver_.lock();
  on_failure_ = std::move(handler);
}

// ---- operations

Work P2pEngine::send(BufferView data, Rank to, uint32_t tag, const CallOptions& options) {
  Lock lock = driver_.lock();
  auto operation = begin_operation(false, std::move(data), to, tag, options);
  if (!operation) return Work(tl::unexpected(operation.error()));
  channel_to(to).send(*operation);
  return finish_call(lock, *operation, options);
}

Work P2pEngine::receive(BufferView data, Rank from, uint32_t tag, const CallOptions& options) {
  Lock lock = driver_.lock();
  if (!failure_) driver_.loop().run_pollers();  // the message may have arrived already
  auto operation = begin_operation(true, std::move(data), from, tag, options);
  if (!operation) {
    driver_.run_callbacks(lock);  // the pollers above may have finished other operations
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
                fmt::format("{}: a rank cannot send to itself; copy the tensor", operation->to_string()));
  }
  if (const auto why = receives ? failure_ : send_failure(peer)) {
    return tl::unexpected(why->in(operation->to_string()));
  }
  operation->deadline = Deadline::after(options.timeout);
  operation->driver = shared_from_this();
  operation->pending_index = pending_.size();
  pending_.push_back(operation);
  next_deadline_ = std::min(next_deadline_, operation->deadline.when());
  return operation;
}

Work P2pEngine::finish_call(Lock& lock, const MessagePtr& operation, const CallOptions& options) {
  if (!options.async) {
    driver_.wait_until(
        lock, [&] { return operation->over; }, Deadline::never());
  }
  if (has_work()) driver_.provide_progress();
  driver_.run_callbacks(lock);
  if (operation->over && !operation->receives && operation->result) return Work(Result<>());
  return Work(operation);
}

void P2pEngine::drive(Work::State& state, const Deadline& deadline) {
  auto& operation = static_cast<MessageOperation&>(state);
  Lock lock = driver_.lock();
  driver_.wait_until(
      lock, [&] { return operation.over; }, deadline);
  if (has_work()) driver_.provide_progress();
  driver_.run_callbacks(lock);
}

void P2pEngine::finish(const MessagePtr& operation, Result<> result) {
  if (operation->over) return;
  operation->over = true;
  // Removes the operation in O(1): the last pending operation takes its place.
  pending_.back()->pending_index = operation->pending_index;
  std::swap(pending_[operation->pending_index], pending_.back());
  pending_.pop_back();
  if (pending_.empty()) next_deadline_ = TimePoint{INT64_MAX};
  if (!result) result = tl::unexpected(result.error().in(operation->to_string()));
  auto callbacks = operation->finish(result);
  for (auto& callback : callbacks) {
    driver_.add_callback([callback = std::move(callback), result] { callback(result); });
  }
  driver_.notify();
}

void P2pEngine::expire() {
  const TimePoint now = steady_clock().now();
  if (now < next_deadline_) return;
  // A copy, because time_out() changes pending_.
  const std::vector<MessagePtr> pending = pending_;
  for (const MessagePtr& operation : pending) {
    if (!operation->over && operation->deadline.when() <= now) time_out(operation);
  }
  next_deadline_ = TimePoint{INT64_MAX};
  for (const MessagePtr& operation : pending_) {
    next_deadline_ = std::min(next_deadline_, operation->deadline.when());
  }
}

void P2pEngine::time_out(const MessagePtr& operation) {
  const Rank rank = operation->peer == kAnyRank ? operation->source : operation->peer;
  const std::string peer = rank == kNoRank ? "any rank" : links_->endpoint(rank).name;
  if (operation->receives && matcher_.withdraw(operation->peer, operation->tag, operation)) {
    return finish(operation,
                  fail(ErrorCode::kTimeout,
                       fmt::format("timed out waiting for a message from {} with tag {}", peer, operation->tag), rank));
  }
  // A part of the message was sent or received, so the link cannot be used for another message.
  const char* what = operation->receives ? "did not send the whole message in time" : "did not receive it in time";
  fail_all(Error{ErrorCode::kTimeout, fmt::format("{} {} (tag {})", peer, what, operation->tag), rank,
                 operation->to_string()});
}

std::optional<Error> P2pEngine::send_failure(Rank to) const {
  if (failure_) return failure_;
  const auto departure = departed_.find(to);
  return departure == departed_.end() ? std::nullopt : std::optional(departure->second.why);
}

std::optional<Error> P2pEngine::receive_failure(Rank from) const {
  if (failure_) return failure_;
  if (from != kAnyRank) {
    const auto departure = departed_.find(from);
    return departure == departed_.end() || !departure->second.drained ? std::nullopt
                                                                      : std::optional(departure->second.why);
  }
  const auto drained = std::ranges::count_if(departed_, [](const auto& each) { return each.second.drained; });
  if (drained < self_.size - 1) return std::nullopt;
  return Error{ErrorCode::kLeft, "all other ranks have left the group", kNoRank, {}};
}

// ---- links

OutgoingMessages& P2pEngine::channel_to(Rank rank) {
  auto& channel = outgoing_[rank];
  if (!channel) {
    channel = std::make_unique<OutgoingMessages>(*this, rank);
    links_->dial(rank, Deadline::after(kDialTime));
    links_->monitor_process(rank);
  }
  return *channel;
}

void P2pEngine::on_linked(Rank rank, LinkTable::Side side, Link& link) {
  if (side == LinkTable::Side::kDialed) return outgoing_[rank]->open(link);
  links_->monitor_process(rank);
  auto& channel = incoming_[rank];
  channel = std::make_unique<IncomingMessages>(*this, matcher_, rank);
  channel->open(link);
}

bool P2pEngine::on_dial_failed(Rank rank, Error why) {
  why.rank = rank;
  if (why.code == ErrorCode::kPeerLost || why.code == ErrorCode::kTimeout) return true;
  if (why.code == ErrorCode::kUnavailable) {
    // The rank listened when the group was formed, so a refused connection means that it is gone.
    why.message = fmt::format("{} has left the group, or died: {}", links_->endpoint(rank).name, why.message);
    on_departure(rank, why);
  } else {
    fail_all(why);
  }
  return false;
}

void P2pEngine::probe_later(Rank rank) {
  if (probing_ || incoming_.contains(rank)) return;
  probing_ = true;
  driver_.loop().after(kProbeAfter, [this] {
    probing_ = false;
    if (!failure_) probe();
  });
}

/// Dials the ranks that receives wait for. The link reports when such a rank leaves, and the dial fails if the rank has
/// left already.
void P2pEngine::probe() {
  std::set<Rank> awaited;
  for (const MessagePtr& operation : pending_) {
    if (!operation->receives || operation->matched) continue;
    if (operation->peer != kAnyRank) awaited.insert(operation->peer);
    for (Rank rank = 0; operation->peer == kAnyRank && rank < self_.size; ++rank) awaited.insert(rank);
  }
  awaited.erase(self_.rank);
  for (const Rank rank : awaited) {
    links_->monitor_process(rank);
    if (awaited.size() <= kMaxProbes && !incoming_.contains(rank) && !departed_.contains(rank)) (void)channel_to(rank);
  }
}

// ---- failures

void P2pEngine::on_lost(Rank rank, const Error& why) {
  if (failure_) return;
  if (why.code == ErrorCode::kLeft) {
    on_departure(rank, why);
  } else if (!departed_.contains(rank)) {
    return fail_all(why);
  }
  const Link* incoming = links_->link(rank, LinkTable::Side::kAccepted);
  if (incoming != nullptr && !incoming->is_open()) end_receives(rank);
}

/// Ends the sends to the rank at once. Receives from the rank may still succeed: its messages may be on their way, or
/// the listener may still be accepting its link.
void P2pEngine::on_departure(Rank rank, const Error& why) {
  if (!departed_.try_emplace(rank, Departure{why}).second) return;
  if (const auto found = outgoing_.find(rank); found != outgoing_.end()) found->second->abandon();
  links_->close_dialed(rank, why);  // before the sends end, because then their memory belongs to the caller again
  const std::vector<MessagePtr> pending = pending_;
  for (const MessagePtr& operation : pending) {
    if (!operation->receives && operation->peer == rank) finish(operation, tl::unexpected(why));
  }
  driver_.loop().after(kLastReportTime, [this, rank] {
    const Link* incoming = links_->link(rank, LinkTable::Side::kAccepted);
    if (!failure_ && (incoming == nullptr || !incoming->is_open())) end_receives(rank);
  });
}

/// Ends the receives from a rank that cannot send any more.
void P2pEngine::end_receives(Rank rank) {
  departed_.at(rank).drained = true;
  matcher_.forget(rank, [](const UnexpectedPtr& message) { return !message->complete; });  // their rest is lost
  const Error why = *receive_failure(rank);
  const auto all_left = receive_failure(kAnyRank);
  const std::vector<MessagePtr> pending = pending_;
  for (const MessagePtr& operation : pending) {
    if (!operation->receives) continue;
    const bool from_rank = operation->peer == rank || (operation->matched && operation->source == rank);
    if (!from_rank && !(operation->peer == kAnyRank && all_left)) continue;
    matcher_.withdraw(operation->peer, operation->tag, operation);
    finish(operation, tl::unexpected(from_rank ? why : *all_left));
  }
}

void P2pEngine::end_all(const Error& why, Error to_peers) {
  failure_ = why;
  if (to_peers.phase != GroupPhase::kLeft) to_peers.phase = GroupPhase::kRunning;
  for (auto& [rank, channel] : outgoing_) channel->detach();
  for (auto& [rank, channel] : incoming_) channel->detach();
  links_->close(to_peers);  // before the operations end, because then their memory belongs to the caller again
  const std::vector<MessagePtr> pending = pending_;
  for (const MessagePtr& operation : pending) finish(operation, tl::unexpected(why));
  driver_.notify();
}

void P2pEngine::fail_all(const Error& why) {
  if (failure_) return;
  end_all(why, why);
  if (!on_failure_) return;
  // The handler runs before the callbacks of messages, because such a callback may wait for a collective, and the
  // handler ends that collective.
  driver_.add_first_callback([handler = std::move(on_failure_), why] { handler(why); });
  on_failure_ = nullptr;
}

void P2pEngine::abort(const Error& why) {
  const Lock lock = driver_.lock();
  on_failure_ = nullptr;  // the caller knows about the failure
  fail_all(why);
  driver_.wake();
}

void P2pEngine::run_callbacks() {
  Lock lock = driver_.lock();
  driver_.run_callbacks(lock);
}

void P2pEngine::close() {
  Lock lock = driver_.lock();
  if (!links_) return;
  const auto sent = [this] {
    return failure_ || (copies_ == 0 && std::ranges::all_of(pending_, [](const auto& each) { return each->receives; }));
  };
  driver_.wait_until(lock, sent, Deadline::after(kDrainTime));
  on_failure_ = nullptr;
  if (!failure_) {
    const LinkTable::Endpoint* const known = links_->find_endpoint(self_.rank);
    const std::string self = known != nullptr ? known->name : fmt::format("rank {}", self_.rank);
    end_all(was_shut_down(self_.group, self_.rank), has_left(self, self_.rank));
  }
  if (!driver_.stop(lock)) return;
  links_.reset();  // before the channels, because completions of the links refer to them
  outgoing_.clear();
  incoming_.clear();
  driver_.close_loop();
}

}  // namespace muster
