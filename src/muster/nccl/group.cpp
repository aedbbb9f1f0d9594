#include "muster/nccl/group.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "muster/base/process_owned.h"
#include "muster/group/operations.h"
#include "muster/group/recorders.h"
#include "muster/group/shutdown_errors.h"
#include "muster/nccl/collectives.h"
#include "muster/nccl/communicator.h"
#include "muster/nccl/in_flight.h"

namespace muster::nccl {
namespace {

/// How long operations in flight may take to end when their group is left.
constexpr Duration kEndTime = 10s;
/// How long operations in flight may go on after a rank has left.
constexpr Duration kLeaveGrace = 2s;
/// Of the first message to each neighbor, and of one that never comes.
constexpr uint32_t kHelloTag = 0xffff'fff0, kWatchTag = 0xffff'fff1;
constexpr int kChildren = 4;  ///< of a rank in the tree in which ranks watch each other
constexpr Duration kWatchTime = std::chrono::hours(24 * 365);

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
  NcclGroup(std::shared_ptr<Group> host, std::unique_ptr<Communicator> communicator, std::shared_ptr<Device> device)
      : host_(std::move(host)),
        communicator_(std::move(communicator)),
        device_(std::move(device)),
        recorders_(host_->membership(), "nccl", host_->id()),
        in_flight_(
            std::make_shared<InFlight>([this] { return check(); }, [this](const Error& why) { fail_all(why); })) {}

  /// A message from each neighbor in a tree of the ranks, which never comes. It fails when that rank leaves, dies or
  /// aborts the group. This rank then fails, too, and so the news reaches all. A first message makes the link.
  Result<> watch_neighbors() {
    const Rank self = membership().rank;
    std::vector<Rank> neighbors;
    if (self > 0) neighbors.push_back((self - 1) / kChildren);
    for (Rank child = self * kChildren + 1; child <= (self + 1) * kChildren && child < membership().size; ++child) {
      neighbors.push_back(child);
    }
    uint8_t hello = 0;
    std::vector<Work> begun;
    for (const Rank rank : neighbors) {
      begun.push_back(host_->send({&hello, 1, Dtype::kUint8}, rank, kHelloTag, {.async = true}));
      begun.push_back(host_->receive({&never_, 1, Dtype::kUint8}, rank, kHelloTag, {.async = true}));
    }
    for (const Work& each : begun) MUSTER_TRY(each.wait());
    for (const Rank rank : neighbors) {
      const CallOptions options{.timeout = kWatchTime, .async = true};
      watched_.push_back(host_->receive({&never_, 1, Dtype::kUint8}, rank, kWatchTag, options));
    }
    return {};
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
    const bool ended = in_flight_->wait_until_empty(Deadline::after(std::min(timeout(), kEndTime)));
    const Error left = was_shut_down(membership().name, membership().rank);
    if (ended && set_closed(left)) {  // peers may still need NCCL's threads: the destructor of the communicator waits
      in_flight_->fail(left, [] {});
    } else {
      in_flight_->fail(left, [&] { close(left); });
    }
    host_->leave();
  }

  Result<> status() const override {
    MUSTER_TRY(status_of_this_rank());
    const std::optional<Error> why = lost_rank();
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
  uint64_t id() const override { return host_->id(); }
  uint64_t sequence() const override { return sequence_; }
  std::string transport() const override { return "nccl"; }
  std::shared_ptr<Arena> arena() const override { return nullptr; }

 private:
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
    if (Result<> given = enqueue(*communicator_, membership(), operations, *device_, Deadline::after(limit)); !given) {
      const Error why = given.error().in(describe(kernel->calls));
      kernel->record_end(tl::unexpected(why));
      return tl::unexpected(why);
    }
    return track(
        kernel, limit, [this, kernel] { return describe(kernel->calls); }, sequence_, std::move(begins));
  }

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
    const Result<> given = enqueue(*communicator_, messages, *device_, Deadline::after(limit));
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
      in_flight_->watch();
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

  /// NCCL has not taken the operation. Unless its arguments were wrong, the group has failed.
  Work refuse(const Error& why) {
    if (why.code != ErrorCode::kUnsupported && why.code != ErrorCode::kInvalidArgument) abort(why);
    return Work(tl::unexpected(why));
  }

  /// A rank that has left may have done its part of the next operation: check() gives that operation some time.
  Result<> check_open() {
    const std::optional<Error> why = lost_rank();
    if (why && why->code != ErrorCode::kLeft && status_of_this_rank()) abort(*why);
    return status();
  }
  Result<> status_of_this_rank() const {
    const std::lock_guard lock(mutex_);
    return closed_ ? tl::unexpected(*closed_) : Result<>{};
  }
  /// Why operations in flight will not end, if so. A rank that has left may have done its part before. Only for the
  /// thread of in_flight_.
  Result<> check() {
    MUSTER_TRY(status());
    MUSTER_TRY(communicator_->status());
    const std::optional<Error> why = lost_rank();
    if (!why) return {};
    if (!left_since_) left_since_ = steady_clock().now();
    return steady_clock().now() - *left_since_ < kLeaveGrace ? Result<>{} : tl::unexpected(*why);
  }
  /// How a neighbor left or died, or why it has aborted the group.
  std::optional<Error> lost_rank() const {
    for (const Work& each : watched_) {
      if (!each.done()) continue;
      const Result<> result = each.result();
      Error why = result ? Error{ErrorCode::kProtocol, "a message came that is none of the group's"} : result.error();
      why.context.clear();  // the message is no call of the program
      return why;
    }
    return std::nullopt;
  }

  /// Later operations fail. False if they did so before.
  bool set_closed(const Error& why) {
    const std::lock_guard lock(mutex_);
    if (closed_) return false;
    closed_ = why;
    return true;
  }
  /// The same, and ends the kernels that are pending. Returns when they have ended, also if another thread does it.
  void close(const Error& why) {
    (void)set_closed(why);
    communicator_->abort();
  }
  /// Ends the group at all ranks.
  void fail_all(const Error& why) {
    host_->abort(why);
    close(why);
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
  const std::unique_ptr<Communicator> communicator_;
  const std::shared_ptr<Device> device_;
  GroupRecorders recorders_;
  std::mutex order_;  ///< of the calls: NCCL's must be in the same order at all ranks
  std::atomic<uint64_t> sequence_ = 0;
  mutable std::mutex mutex_;  ///< guards closed_ and hook_
  std::optional<Error> closed_;
  std::shared_ptr<CompletionHook> hook_;
  const std::shared_ptr<InFlight> in_flight_;
  uint8_t never_ = 0;
  std::optional<TimePoint> left_since_;  ///< only for check()
  std::vector<Work> watched_;            ///< constant once the group is formed
};

}  // namespace

Result<std::unique_ptr<Group>> form_group(std::shared_ptr<Group> host, std::shared_ptr<Device> device) {
  MUSTER_ASSIGN(const Library* const library, Library::get());
  const Deadline deadline = Deadline::after(host->timeout());
  MUSTER_ASSIGN(auto communicator, Communicator::form(*library, *host, deadline));
  auto group = std::make_unique<NcclGroup>(std::move(host), std::move(communicator), std::move(device));
  MUSTER_TRY(group->watch_neighbors());
  return group;
}

}  // namespace muster::nccl
