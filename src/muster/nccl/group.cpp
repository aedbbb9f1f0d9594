#include "muster/nccl/group.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "muster/base/hash.h"
#include "muster/base/process_owned.h"
#include "muster/group/operations.h"
#include "muster/group/recorders.h"
#include "muster/group/shutdown_errors.h"
#include "muster/nccl/collectives.h"
#include "muster/nccl/communicator.h"
#include "muster/nccl/in_flight.h"
#include "muster/nccl/peer_monitor.h"

namespace muster::nccl {
namespace {

/// How long operations in flight may take to end when their group is left.
constexpr Duration kEndTime = 10s;
/// How long operations in flight may go on after a rank has left.
constexpr Duration kLeaveGrace = 2s;

/// A kernel of collectives or of messages, for the flight recorder and for the group's hook.
struct Launch {
  Recorder* recorder = nullptr;                    ///< may be null
  std::shared_ptr<CompletionHook> hook = nullptr;  ///< may be null
  TimePoint submitted = {}, started = submitted;
  std::vector<Recorder::Ticket> tickets = {};
  std::vector<Call> calls = {};

  void begun() {
    started = steady_clock().now();
    for (const Recorder::Ticket each : tickets) recorder->started(each);
  }
  void ended(const Result<>& result) const {
    record_end(result);
    const TimePoint now = steady_clock().now();
    for (const Call& each : calls) {
      if (hook) (*hook)({each, submitted, started, now, result});
    }
  }
  void record_end(const Result<>& result) const {
    for (const Recorder::Ticket each : tickets) recorder->ended(each, result);
  }
};

class NcclGroup final : public Group, public ProcessOwned<NcclGroup> {
 public:
  NcclGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device)
      : host_(std::move(host)),
        device_(std::move(device)),
        id_(fnv1a(std::array{host_->id()})),
        recorders_(host_->membership(), "nccl", id_),
        peers_(host_, id_),
        in_flight_(std::make_shared<InFlight>([this](InFlight::Load load) { return check(load); },
                                              [this](const Error& why) { fail_all(why); })) {}

  /// Must come first. A rank that fails tells the others, so that they do not wait for it.
  Result<> form() {
    const Result<> formed = connect();
    if (!formed) host_->abort(formed.error());
    return formed;
  }
  ~NcclGroup() override {
    leave();
    in_flight_->stop();
  }

  Work send(BufferView data, Rank to, uint32_t tag, const CallOptions& options) override {
    return exchange({{std::move(data), to, tag, true}}, options).front();
  }
  Work receive(BufferView data, Rank from, uint32_t tag, const CallOptions& options) override {
    return exchange({{std::move(data), from, tag, false}}, options).front();
  }
  std::vector<Work> exchange(std::vector<Message> messages, const CallOptions& options) override {
    if (messages.empty()) return {};
    return {submit_messages(messages, options)};
  }

  void abort(Error why) override {
    if (inherited()) return;
    in_flight_->fail(why, [&] { fail_all(why); });
  }
  void leave() override {
    if (inherited()) return;
    if (left_.exchange(true)) return;
    const bool ended = in_flight_->wait_until_empty(Deadline::after(std::min(timeout(), kEndTime)));
    // Peers may still need NCCL's threads: the destructor of the communicator waits.
    const bool abort = !ended || !in_flight_->status();
    in_flight_->fail(was_shut_down(membership().name, membership().rank), [&] {
      if (abort) end_kernels();
    });
    host_->leave();
  }

  Result<> status() const override {
    MUSTER_TRY(in_flight_->status());
    const std::optional<Error> why = peers_.lost();
    return why && why->code != ErrorCode::kLeft ? tl::unexpected(*why) : Result<>{};
  }
  Result<> wait_for_pending(const Deadline& deadline) override {
    if (in_flight_->wait_until_empty(deadline)) return {};
    return muster::fail(ErrorCode::kTimeout,
                        fmt::format("operations of group \"{}\" are still pending", membership().name));
  }
  void on_completion(CompletionHook hook) override {
    const std::lock_guard lock(mutex_);
    hook_ = hook ? std::make_shared<CompletionHook>(std::move(hook)) : nullptr;
  }
  Result<> set_timeout(Duration timeout) override { return host_->set_timeout(timeout); }
  Duration timeout() const override { return host_->timeout(); }
  const GroupOptions& options() const override { return host_->options(); }
  const GroupSpec& membership() const override { return host_->membership(); }
  uint64_t id() const override { return id_; }
  uint64_t sequence() const override { return sequence_; }
  std::string transport() const override { return "nccl"; }
  std::shared_ptr<Arena> arena() const override { return nullptr; }

 private:
  Result<> connect() {
    const Deadline deadline = Deadline::after(timeout());
    MUSTER_TRY(peers_.connect());
    auto made = Library::get().and_then([&](const Library* library) {
      return Communicator::form(
          *library, device_, *host_, [this] { return peers_.lost(); }, deadline);
    });
    if (!made) {
      const bool is_own = made.error().rank == kNoRank && made.error().code != ErrorCode::kTimeout;
      if (is_own) made.error().rank = membership().rank;
      return tl::unexpected(made.error());
    }
    communicator_ = std::move(*made);
    in_flight_->start();
    return {};
  }

  Work begin(Operation&& operation, const CallOptions& options) override {
    std::vector<Operation> one;
    one.push_back(std::move(operation));
    return begin_all(std::move(one), options);
  }
  Work begin_all(std::vector<Operation>&& operations, const CallOptions& options) override {
    if (operations.empty()) return Work(Result<>{});
    if (const Result<> open = check_open(); !open) {
      operations.front().call.sequence = sequence_ + 1;
      return Work(tl::unexpected(open.error().in(describe({operations.front().reported_call()}))));
    }
    const Result<Work> launched = launch(operations, options);
    if (!launched) return refuse(launched.error());
    return options.async ? *launched : Work(launched->wait(), launched->sequence());
  }
  Result<Work> launch(std::vector<Operation>& operations, const CallOptions& options) {
    const std::lock_guard order(order_);
    const Duration limit = timeout_of(options);
    const auto kernel = std::make_shared<Launch>(Launch{recorders_.collectives(), hook(), steady_clock().now()});
    for (Operation& each : operations) {
      each.call.sequence = ++sequence_;
      if (kernel->recorder != nullptr) {
        each.site = current_call_site();
        kernel->tickets.push_back(kernel->recorder->submitted(each, Recorder::Start::kLater));
      }
      kernel->calls.push_back(each.reported_call());
    }
    const bool reports = (kernel->recorder != nullptr || kernel->hook != nullptr) && !device_->capturing();
    auto begins = reports ? device_->record() : nullptr;
    Result<> given;
    try {
      given = enqueue(*communicator_, membership(), operations, *device_, Deadline::after(limit));
    } catch (...) {
      sequence_ -= operations.size();  // the program may try the call again
      kernel->record_end(no_memory());
      throw;  // tidy: allow(throw) torch's error of Device::allocate()
    }
    if (!given) {
      const Error why = given.error().in(describe(kernel->calls));
      kernel->record_end(tl::unexpected(why));
      return tl::unexpected(why);
    }
    return track(
        kernel, limit, [this, kernel] { return describe(kernel->calls); }, sequence_, std::move(begins));
  }

  static Result<> no_memory() { return muster::fail(ErrorCode::kResourceExhausted, "the device has no memory left"); }

  std::string describe(const std::vector<Call>& calls) const {
    const std::string more = calls.size() > 1 ? fmt::format(" and {} more calls", calls.size() - 1) : "";
    return fmt::format("{}{}, group \"{}\"", calls.front().to_string(), more, membership().name);
  }

  Work submit_messages(const std::vector<Message>& messages, const CallOptions& options) {
    for (const Message& each : messages) {
      if (const Result<> valid = check_message(each); !valid) return Work(tl::unexpected(valid.error()));
    }
    const std::string what = describe(messages);
    if (const Result<> open = check_open(); !open) return Work(tl::unexpected(open.error().in(what)));
    std::unique_lock order(order_);
    const Duration limit = timeout_of(options);
    const auto kernel = std::make_shared<Launch>(Launch{.recorder = recorders_.messages()});
    for (const Message& each : messages) {
      if (kernel->recorder == nullptr) break;
      const CallSite site = current_call_site();
      kernel->tickets.push_back(each.send ? kernel->recorder->sending(each.data, each.peer, each.tag, site)
                                          : kernel->recorder->receiving(each.data, each.peer, each.tag, site));
    }
    Result<> given;
    try {
      given = enqueue(*communicator_, messages, *device_, Deadline::after(limit));
    } catch (...) {
      kernel->record_end(no_memory());
      throw;  // tidy: allow(throw) as in launch()
    }
    if (!given) {
      order.unlock();
      kernel->record_end(given);
      return refuse(given.error().in(what));
    }
    return track(
        kernel, limit, [what] { return what; }, 0, nullptr);
  }
  Result<> check_message(const Message& message) const {
    if (message.peer == kAnyRank) {
      return muster::fail(ErrorCode::kUnsupported, "NCCL cannot receive from any rank: name one");
    }
    if (message.peer < 0 || message.peer >= membership().size) {
      return muster::fail(ErrorCode::kInvalidArgument, fmt::format("rank {}, but the group's ranks are 0 to {}",
                                                                   message.peer, membership().size - 1));
    }
    if (message.tag != 0) {
      return muster::fail(ErrorCode::kUnsupported, "NCCL matches messages by their order: use tag 0");
    }
    return {};
  }
  static std::string describe(const std::vector<Message>& messages) {
    std::string text;
    for (const Message& each : messages) {
      text += fmt::format("{}{} rank {}", text.empty() ? "" : ", ", each.send ? "send to" : "receive from", each.peer);
    }
    return text;
  }

  /// `begins`: the point in the stream before the kernel; may be null.
  Work track(const std::shared_ptr<Launch>& kernel, Duration limit, std::function<std::string()> describe,
             uint64_t sequence, std::unique_ptr<Device::Event> begins) {
    if (device_->capturing()) {  // nothing runs: replays have no Work
      kernel->record_end({});
      captured_ = true;
      return Work(Result<>{}, sequence);
    }
    return in_flight_->add({.work = std::make_shared<Work::State>(),
                            .event = device_->record(),
                            .deadline = Deadline::after(limit).when(),
                            .describe = std::move(describe),
                            .ended = [kernel](const Result<>& result) { kernel->ended(result); },
                            .begins = std::move(begins),
                            .begun = [kernel] { kernel->begun(); }},
                           sequence);
  }

  /// NCCL has not taken the operation. Unless its arguments were wrong, the group has failed, or it failed before and
  /// that is why.
  Work refuse(const Error& why) {
    if (why.code == ErrorCode::kUnsupported || why.code == ErrorCode::kInvalidArgument) {
      return Work(tl::unexpected(why));
    }
    abort(why);
    const Result<> failed = in_flight_->status();
    return Work(tl::unexpected(failed ? why : failed.error().in(why.context)));
  }

  /// A rank that has left may have done its part of the next operation: check() gives that operation some time.
  Result<> check_open() {
    const std::optional<Error> why = peers_.lost();
    if (why && why->code != ErrorCode::kLeft && in_flight_->status()) abort(*why);
    return status();
  }
  /// Why the operations of `load` will not end, if so. One thread at a time may call it.
  Result<> check(InFlight::Load load) {
    MUSTER_TRY(status());
    MUSTER_TRY(communicator_->status());
    const bool overdue = load == InFlight::Load::kOverdue;
    if (load != InFlight::Load::kNone || captured_) {
      const std::optional<Error> left = overdue ? peers_.lost() : peers_.lost_for(kLeaveGrace);
      if (left) return tl::unexpected(*left);
    }
    return overdue || peers_.asked() ? tl::unexpected(peers_.explain_timeout()) : Result<>{};
  }

  /// Returns when they have ended, also if another thread ends them.
  void end_kernels() {
    if (communicator_) communicator_->abort();
  }
  /// Ends the group at all ranks. Later operations fail, because InFlight::fail() calls this.
  void fail_all(const Error& why) {
    host_->abort(why);
    end_kernels();
  }

  std::shared_ptr<CompletionHook> hook() const {
    const std::lock_guard lock(mutex_);
    return hook_;
  }
  Duration timeout_of(const CallOptions& options) const {
    return options.timeout > Duration::zero() ? options.timeout : timeout();
  }

  Result<std::unique_ptr<Group>> form_child(Store& store, const std::vector<Rank>& ranks,
                                            const GroupSpec& child) override {
    MUSTER_ASSIGN(std::unique_ptr<Group> host, form_child_of(*host_, store, ranks, child));
    return form_group(std::move(host), device_);
  }
  Result<std::unique_ptr<Group>> form_duplicate(const GroupSpec& duplicate) override {
    MUSTER_ASSIGN(std::unique_ptr<Group> host, form_duplicate_of(*host_, duplicate));
    return form_group(std::move(host), device_);
  }
  Result<std::unique_ptr<Group>> form_merged(Store& store, const GroupSpec& merged) override {
    MUSTER_ASSIGN(std::unique_ptr<Group> host, host_->merge(store, merged));
    return form_group(std::move(host), device_);
  }

  const std::shared_ptr<Group> host_;
  std::unique_ptr<Communicator> communicator_;  ///< constant after form(); null if that failed
  const std::shared_ptr<Device> device_;
  const uint64_t id_;  ///< another one than the host's, which has its own flight recorders
  GroupRecorders recorders_;
  PeerMonitor peers_;
  std::mutex order_;  ///< of the calls: NCCL's must be in the same order at all ranks
  std::atomic<uint64_t> sequence_ = 0;
  mutable std::mutex mutex_;  ///< guards hook_
  std::shared_ptr<CompletionHook> hook_;
  const std::shared_ptr<InFlight> in_flight_;
  std::atomic<bool> captured_ = false;  ///< a graph may run operations at any time
  std::atomic<bool> left_ = false;      ///< leave() was called
};

}  // namespace

Result<std::unique_ptr<Group>> form_group(std::shared_ptr<Group> host, std::shared_ptr<Device> device) {
  auto group = std::make_unique<NcclGroup>(std::move(host), std::move(device));
  MUSTER_TRY(group->form());
  return group;
}

}  // namespace muster::nccl
