#include "muster/rpc/client.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/rpc/function_table.h"
#include "muster/transport/transport.h"

namespace muster::rpc {
namespace {

/// The most workers that are remembered to have left.
constexpr size_t kMaxLeft = 4096;
constexpr Duration kRetryDelay = 100ms;
/// The calls have their own deadlines, so a dial has practically none.
constexpr Duration kDialTime = std::chrono::hours(24);
/// The pings in one heartbeat timeout.
constexpr int kPings = 4;

/// Checks an answer before memory is allocated for it.
Result<> check_answer(const PeerCalls& calls, const MessageHeader& header) {
  const Kind kind = header.kind;
  const bool is_answer = kind == Kind::kReply || kind == Kind::kError || kind == Kind::kStarted;
  if (is_answer && calls.is_in_flight(header.id)) return {};
  return fail(ErrorCode::kProtocol,
              fmt::format("sent a message of kind {} for request {}", static_cast<int>(kind), header.id));
}

double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

/// It may go to the worker that has the name next.
bool waits_for_successor(const OutgoingCall& call) {
  return call.options.idempotent && call.options.waits_for_successor;
}

}  // namespace

CallError local_error(ErrorCode code, std::string message, Rank rank) {
  return CallError{Error{code, std::move(message), rank, {}}, {}, {}};
}

Client::Client(LoopDriver& driver, LinkTable& links, Directory& directory, const EndpointOptions& options,
               const WorkerRecord& self, CallLog& log)
    : driver_(driver),
      links_(links),
      options_(options),
      self_(self),
      log_(log),
      look_up_(driver, directory, [this](const auto& name, const auto& found) { return on_looked_up(name, found); }) {
  check_heartbeats();
}

// ---- calls

void Client::begin(const CallPtr& call, TimePoint now) {
  call->deadline = pending_.emplace_hint(pending_.end(), now + call->options.timeout, call);
  call->logged = log_.begin(CallSide::kCaller, shown_name(call->function), call->to, call->arguments.footprint());
}

void Client::dispatch(const CallPtr& call, TimePoint now) {
  if (closed_) return finish(*call, tl::unexpected(CallError{*closed_, {}, {}}));
  const auto name = names_.find(call->to);
  if (name == names_.end()) return look_up(call);
  Callee& callee = *callees_.at(name->second);
  call->peer = name->second;
  if (callee.calls.add(call)) return send_waiting(callee, now);
  finish(*call, tl::unexpected(too_many_wait(callee.record.to_string())));
}

CallError Client::too_many_wait(const std::string& worker) const {
  return local_error(
      ErrorCode::kResourceExhausted,
      fmt::format("{} calls to {} wait already: wait for some of them first", options_.max_queued_calls, worker));
}

void Client::send_waiting(Callee& callee, TimePoint now) {
  if (!callee.calls.has_waiting()) return;
  if (!callee.channel) {
    const Rank rank = callee.record.worker.id;
    links_.set_endpoint(rank, callee.endpoint);
    links_.dial(rank, Deadline::after(kDialTime));
    links_.monitor_process(rank);
    return;
  }
  if (!callee.channel->link().is_open()) return;  // on_lost() follows
  if (callee.calls.in_flight() == 0) callee.last_heard = now;
  while (const CallPtr call = callee.calls.next()) send(callee, *call, now);
  callee.channel->flush();
}

void Client::send(Callee& callee, OutgoingCall& call, TimePoint now) {
  MessageHeader header{.kind = Kind::kRequest, .id = call.id};
  if (call.options.one_way) header.flags |= kOneWay;
  if (call.retried) header.flags |= kRetry;
  const Duration left = call.deadline->first - now;
  header.timeout_us = static_cast<uint64_t>(std::max(left, Duration::zero()) / 1us);
  callee.channel->write(header, call.function, call.arguments);
  CallLog::set_request(call.logged, callee.record.worker.id, call.id);
  log_.started(call.logged);
  if (!call.options.idempotent) call.arguments = {};
}

void Client::finish(OutgoingCall& call, CallResult result) {
  if (call.done()) return;
  const CallPtr shared = std::move(call.deadline->second);
  pending_.erase(call.deadline);
  call.arguments = {};  // a Future may keep the call for long
  log_.end(call.logged, result);
  if (!result) result.error().error = result.error().error.in(call.to_string());
  for (auto& callback : call.finish(std::move(result))) {
    driver_.add_callback([shared, callback = std::move(callback)] { callback(); });
  }
  driver_.notify();
}

void Client::abandon(OutgoingCall& call, CallError why) {
  if (call.done()) return;
  if (call.cancel_here) call.cancel_here();
  if (const auto found = callees_.find(call.peer); found != callees_.end()) {
    Callee& callee = *found->second;
    const bool sent = !call.waits && call.id != 0;
    callee.calls.abandon(call);
    if (sent && callee.channel) {
      callee.channel->write({.kind = Kind::kCancel, .id = call.id}, {}, {});
      callee.channel->flush();
    }
  } else if (std::exchange(call.waits, false)) {
    unresolved_.at(call.to).erase(call.place);
  }
  finish(call, tl::unexpected(std::move(why)));
}

void Client::end_calls(const Error& why) {
  closed_ = why;
  for (const auto& [rank, callee] : callees_) (void)callee->calls.take_waiting();
  while (!pending_.empty()) {
    const CallPtr call = pending_.begin()->second;
    if (call->cancel_here) call->cancel_here();
    finish(*call, tl::unexpected(CallError{why, {}, {}}));
  }
  unresolved_.clear();
  look_up_.end();
}

void Client::join_look_ups() { look_up_.join(); }

void Client::close() {
  callees_.clear();
  names_.clear();
}

std::string Client::describe_pending() const {
  const std::string first = pending_.begin()->second->to_string();
  return pending_.size() == 1 ? first : fmt::format("{} calls, such as {}", pending_.size(), first);
}

void Client::expire() {
  const TimePoint now = steady_clock().now();
  while (!pending_.empty() && pending_.begin()->first <= now) {
    const CallPtr call = pending_.begin()->second;
    abandon(*call, local_error(ErrorCode::kTimeout, timeout_message(*call), call->peer));
  }
}

std::string Client::timeout_message(const OutgoingCall& call) const {
  const double limit = seconds(call.options.timeout);
  const auto found = callees_.find(call.peer);
  if (found == callees_.end()) {
    if (call.to == self_.worker.name) return fmt::format("the function has not returned within {:g} s", limit);
    return fmt::format("no worker named \"{}\" has joined within {:g} s", call.to, limit);
  }
  const Callee& callee = *found->second;
  const std::string worker = callee.record.to_string();
  if (!callee.channel) return fmt::format("could not connect to {} within {:g} s", worker, limit);
  if (call.waits) {
    return fmt::format("waited {:g} s for room: {} has {} calls without a result", limit, worker,
                       callee.calls.in_flight());
  }
  return fmt::format("{} has not returned a result within {:g} s", worker, limit);
}

TimePoint Client::next_deadline() const { return pending_.empty() ? TimePoint{INT64_MAX} : pending_.begin()->first; }

// ---- names

void Client::look_up(const CallPtr& call) {
  const auto [found, is_new] = unresolved_.try_emplace(call->to);
  std::list<CallPtr>& calls = found->second;
  if (calls.size() >= options_.max_queued_calls) {
    return finish(*call, tl::unexpected(too_many_wait(fmt::format("worker \"{}\", which has not joined,", call->to))));
  }
  call->waits = true;
  call->place = calls.insert(calls.end(), call);
  if (!is_new) return;
  if (Result<> added = look_up_.add(call->to); !added) {
    abandon(*call, CallError{std::move(added.error()), {}, {}});
    unresolved_.erase(call->to);
  }
}

/// Returns true if the name must be looked up again.
bool Client::on_looked_up(const std::string& name, const Result<std::optional<WorkerRecord>>& found) {
  const auto names = unresolved_.find(name);
  if (names == unresolved_.end()) return false;  // closed
  if (found && !*found) fail_calls_to_left(name, names->second);
  if (found ? !*found : found.error().code == ErrorCode::kTimeout) {
    if (!names->second.empty()) return true;
    unresolved_.erase(names);
    return false;
  }
  const std::list<CallPtr> calls = std::move(names->second);
  unresolved_.erase(names);
  left_.erase(name);
  const Result<> added = found ? add_callee(**found) : tl::unexpected(found.error());
  for (const CallPtr& call : calls) {
    call->waits = false;
    if (added) {
      dispatch(call, steady_clock().now());
    } else {
      finish(*call, tl::unexpected(CallError{added.error(), {}, {}}));
    }
  }
  return false;
}

/// No worker has the name now. Calls fail that do not wait for one.
void Client::fail_calls_to_left(const std::string& name, std::list<CallPtr>& calls) {
  const auto left = left_.find(name);
  const bool may_join = left == left_.end() && !options_.fixed_members;
  const std::string why = left != left_.end()
                              ? left->second + " has left"
                              : fmt::format("no worker has the name \"{}\": it has left, or the name is wrong", name);
  std::erase_if(calls, [&](const CallPtr& call) {
    if (may_join ? call->options.waits_for_successor : waits_for_successor(*call)) return false;
    call->waits = false;
    finish(*call, tl::unexpected(local_error(ErrorCode::kPeerLost, why)));
    return true;
  });
}

/// The address and the transport by which this worker dials the other one.
Result<LinkTable::Endpoint> Client::endpoint_of(const WorkerRecord& record) const {
  LinkTable::Endpoint endpoint{record.to_string(), record.process, {}, Transport::kUnix};
  if (options_.relay) {
    MUSTER_ASSIGN(const Address route, options_.relay->route(record.local_address));
    endpoint.address = route.to_string();
    return endpoint;
  }
  const bool local =
      !record.local_address.empty() && !self_.local_address.empty() && record.memory_domain == self_.memory_domain;
  endpoint.address = local ? record.local_address : record.tcp_address;
  endpoint.transport = local ? parse_transports(options_.transports).value().front() : Transport::kTcp;
  if (endpoint.address.empty()) {
    return fail(ErrorCode::kUnavailable, fmt::format("{} is on another host and does not accept TCP; allow tcp in the "
                                                     "transports of all workers",
                                                     record.to_string()));
  }
  MUSTER_TRY(Address::parse(endpoint.address));
  return endpoint;
}

Result<> Client::add_callee(const WorkerRecord& record) {
  MUSTER_ASSIGN(LinkTable::Endpoint endpoint, endpoint_of(record));
  const Rank id = record.worker.id;
  names_[record.worker.name] = id;
  if (callees_.contains(id)) return {};
  callees_.emplace(id, std::make_shared<Callee>(record, std::move(endpoint), options_.max_queued_calls));
  return {};
}

// ---- links

void Client::on_linked(Rank rank, Link& link) {
  const auto found = callees_.find(rank);
  if (found == callees_.end()) return;  // closed
  Callee& callee = *found->second;
  const auto ended = [this, rank, weak = std::weak_ptr(found->second)](const Error& why) {
    driver_.loop().post([this, rank, weak, why] {
      if (const auto lost = weak.lock(); lost && lost->channel) on_lost(rank, why);
    });
  };
  callee.channel = std::make_unique<Channel>(
      link, options_.max_message_bytes,
      Channel::Events{
          .announced = [&callee](const ParsedMessage& answer) { return check_answer(callee.calls, answer.header); },
          .received = [this, &callee](ParsedMessage answer) { on_answer(callee, std::move(answer)); },
          .ended = ended});
  callee.channel->start();
  Writer process;
  process.put<int32_t>(self_.process.pid).put_string(self_.process.domain);
  callee.channel->write({.kind = Kind::kHello, .flags = kWireVersion}, self_.worker.name, {process.take(), {}});
  send_waiting(callee, steady_clock().now());
  callee.channel->flush();
}

void Client::on_answer(Callee& callee, ParsedMessage answer) {
  callee.last_heard = callee.channel->last_read();
  if (const Result<> handled = handle_answer(callee, answer); !handled) {
    return callee.channel->close(handled.error());
  }
  send_waiting(callee, callee.last_heard);
}

Result<> Client::handle_answer(Callee& callee, ParsedMessage& answer) {
  const Kind kind = answer.header.kind;
  MUSTER_ASSIGN(const CallPtr call, callee.calls.on_answer(answer.header.id, kind == Kind::kStarted));
  if (kind == Kind::kError) {
    MUSTER_ASSIGN(CallError error, parse_error(answer.message));
    error.error.rank = callee.record.worker.id;
    if (call) finish(*call, tl::unexpected(std::move(error)));
  } else if (call) {
    finish(*call, std::move(answer.message));
  }
  return {};
}

bool Client::is_dialing(Rank rank) const {
  const auto found = callees_.find(rank);
  return found != callees_.end() && !found->second->channel;
}

void Client::on_lost(Rank rank, const Error& why) {
  const auto found = callees_.find(rank);
  if (found == callees_.end()) return;
  const std::shared_ptr<Callee> callee = found->second;
  forget(*callee);
  if (why.code == ErrorCode::kLeft) {
    if (left_.size() >= kMaxLeft) left_.clear();
    left_[callee->record.worker.name] = callee->record.to_string();
  }
  // Calls that were not sent yet go to the worker that has the name now.
  std::vector<CallPtr> again = callee->calls.take_waiting();
  for (const CallPtr& call : callee->calls.on_lost()) {
    if (call->options.idempotent) {
      call->retried = true;
      again.push_back(call);
      continue;
    }
    const std::string message = fmt::format("{} was lost while it had the call, which may have run: {}",
                                            callee->record.to_string(), why.message);
    finish(*call, tl::unexpected(local_error(ErrorCode::kPeerLost, message, rank)));
  }
  retry_later(std::move(again));
}

bool Client::on_dial_failed(Rank rank, Error why) {
  const auto found = callees_.find(rank);
  if (found == callees_.end()) return false;
  if (why.code == ErrorCode::kPeerLost || why.code == ErrorCode::kTimeout) return true;
  const std::shared_ptr<Callee> callee = found->second;
  forget(*callee);
  // It accepted connections when it joined, so a refused connection means that it is gone.
  const bool gone = why.code == ErrorCode::kUnavailable;
  if (gone) {
    why.code = ErrorCode::kPeerLost;
    why.message = fmt::format("{} has left, or died: {}", callee->record.to_string(), why.message);
  }
  why.rank = rank;
  std::vector<CallPtr> again;
  for (const CallPtr& call : callee->calls.take_waiting()) {
    if (gone && waits_for_successor(*call)) {
      again.push_back(call);
    } else {
      finish(*call, tl::unexpected(CallError{why, {}, {}}));
    }
  }
  retry_later(std::move(again));
  return false;
}

void Client::forget(Callee& callee) {
  const Rank rank = callee.record.worker.id;
  links_.forget(rank, LinkTable::Side::kDialed);  // before its channel, which the link refers to
  callee.channel.reset();
  const auto name = names_.find(callee.record.worker.name);
  if (name != names_.end() && name->second == rank) names_.erase(name);
  callees_.erase(rank);
}

void Client::retry_later(std::vector<CallPtr> calls) {
  if (calls.empty()) return;
  for (const CallPtr& call : calls) call->peer = kNoRank;
  driver_.loop().after(kRetryDelay, [this, calls = std::move(calls)] {
    for (const CallPtr& call : calls) {
      if (!call->done()) dispatch(call, steady_clock().now());
    }
  });
}

/// Pings the workers that owe an answer, and closes the links of those that have been silent for too long.
void Client::check_heartbeats() {
  const Duration timeout = options_.heartbeat_timeout;
  const TimePoint due = steady_clock().now() + timeout / kPings;
  driver_.loop().at(due, [this, timeout, due] {
    const TimePoint now = steady_clock().now();
    // If this process was stopped itself, what the workers sent meanwhile was not read yet: they are asked again.
    const bool was_stopped = now - due > timeout / kPings;
    for (const auto& [rank, callee] : callees_) {
      if (!callee->channel || callee->calls.in_flight() == 0) continue;
      if (was_stopped) callee->last_heard = now;
      Link& link = callee->channel->link();
      if (now - callee->last_heard > timeout) {
        link.close(
            Error{ErrorCode::kPeerLost,
                  fmt::format("{} has not answered a ping for {:g} s", callee->record.to_string(), seconds(timeout)),
                  rank,
                  {}});
        continue;
      }
      link.ping([weak = std::weak_ptr(callee)] {
        if (const auto alive = weak.lock()) alive->last_heard = steady_clock().now();
      });
    }
    check_heartbeats();
  });
}

}  // namespace muster::rpc
