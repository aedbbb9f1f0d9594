#include "muster/mpi/messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <system_error>
#include <utility>

#include "muster/base/log.h"
#include "muster/base/wait_policy.h"
#include "muster/mpi/datatypes.h"
#include "muster/mpi/device.h"

namespace muster::mpi {
namespace {

/// Idle polls of a waiting thread before it yields.
constexpr int kPolls = 64;
/// How often the thread of the messages tests them while no other thread waits.
constexpr Duration kTestInterval = 100us;
/// A thread that waits looks at its deadline so often, in polls.
constexpr unsigned kPollsPerDeadline = 64;
/// A receive that is canceled ends soon, unless it has begun to take a message whose sender has stopped.
constexpr Duration kCancelTime = 5s;
/// The largest tag that every MPI allows.
constexpr int kGuaranteedTag = 32767;

bool is_finished(Work::State& state) {
  const std::lock_guard lock(state.mutex);
  return state.finished;
}

}  // namespace

struct Messages::Message {
  Message(BufferView memory, Rank other, uint32_t number, bool is_send, Duration limit)
      : data(std::move(memory)), peer(other), tag(number), sends(is_send), timeout(limit) {
    if (data.contiguous()) return;
    packed.resize(data.bytes());
    if (sends) data.read(0, packed.data(), packed.size());
  }

  uint8_t* memory() { return data.contiguous() ? data.data() : packed.data(); }
  std::string to_string() const {
    const std::string other = peer == kAnyRank ? "any rank" : fmt::format("rank {}", peer);
    return fmt::format("{} {} with tag {} ({}[{}])", sends ? "send to" : "receive from", other, tag, name(data.dtype()),
                       data.count());
  }

  const BufferView data;
  Bytes packed;  ///< if `data` is not in one piece
  const Rank peer;
  const uint32_t tag;
  const bool sends;
  const Duration timeout;
  TimePoint deadline;
  Handle request = nullptr;
  const std::shared_ptr<Work::State> work = std::make_shared<Work::State>();
};

Messages::Messages(const World& world, Handle comm, int size)
    : world_(world), mpi_(world.mpi), comm_(comm), size_(size), max_tag_(kGuaranteedTag) {
  int* upper_bound = nullptr;
  int found = 0;
  if (mpi_.Comm_get_attr(comm_, mpi_.tag_upper_bound_key, &upper_bound, &found) == 0 && found != 0)
    max_tag_ = *upper_bound;
}

Messages::~Messages() = default;

Work Messages::send(BufferView data, Rank to, uint32_t tag, Duration timeout) {
  return submit(std::make_shared<Message>(std::move(data), to, tag, true, timeout));
}

Work Messages::receive(BufferView data, Rank from, uint32_t tag, Duration timeout) {
  return submit(std::make_shared<Message>(std::move(data), from, tag, false, timeout));
}

Result<> Messages::check_arguments(const Message& message) const {
  const Rank peer = message.peer;
  if ((peer < 0 || peer >= size_) && !(peer == kAnyRank && !message.sends)) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("the group's ranks are 0 to {}", size_ - 1));
  }
  if (message.tag > static_cast<uint32_t>(max_tag_)) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("the tag is too large: {} allows tags up to {}", mpi_.version(), max_tag_));
  }
  if (message.data.count() > INT_MAX) {
    return fail(ErrorCode::kUnsupported, fmt::format("MPI takes {} elements at most", INT_MAX));
  }
  return {};
}

Work Messages::submit(std::shared_ptr<Message> message) {
  const Lock lock(mutex_);
  if (Result<> begun = begin(message); !begun) return Work(tl::unexpected(begun.error().in(message->to_string())));
  return Work(message->work);
}

/// Needs the lock.
Result<> Messages::begin(const std::shared_ptr<Message>& message) {
  MUSTER_TRY(check_arguments(*message));
  if (closed_) return tl::unexpected(*closed_);
  MUSTER_ASSIGN(const Handle type, type_of(mpi_, message->data.dtype()));
  if (threads_.empty()) MUSTER_TRY(start_thread());
  const CurrentDevice device;
  const int count = static_cast<int>(message->data.count()), tag = static_cast<int>(message->tag);
  if (message->sends) {
    MUSTER_TRY(mpi_.check(mpi_.Isend(message->memory(), count, type, message->peer, tag, comm_, &message->request),
                          "MPI_Isend"));
  } else {
    const int from = message->peer == kAnyRank ? mpi_.any_source : message->peer;
    MUSTER_TRY(
        mpi_.check(mpi_.Irecv(message->memory(), count, type, from, tag, comm_, &message->request), "MPI_Irecv"));
  }
  message->deadline = Deadline::after(message->timeout).when();
  Callbacks none;  // nobody has the Work yet
  if (test(*message, none)) return {};
  message->work->driver = shared_from_this();
  pending_.push_back(message);
  if (waiting_ == 0 && !polling_) changed_.notify_all();
  return {};
}

/// True if MPI has done with the message. Needs the lock.
bool Messages::test(Message& message, Callbacks& callbacks) {
  Status status{};
  int done = 0;
  const int code = mpi_.Test(&message.request, &done, &status);
  if (code == 0 && done == 0) return expire(message, callbacks);
  end(message, outcome_of(message, code, status), callbacks);
  return true;
}

/// Ends a receive whose deadline has passed, or whose group is closed. False if the message goes on.
bool Messages::expire(Message& message, Callbacks& callbacks) {
  const bool late = steady_clock().now() >= message.deadline;
  if (message.sends) {
    if (!late) return false;
    world_.abort(fmt::format("{}: no rank has received it in time, and MPI cannot take it back", message.to_string()));
  }
  if (!late && !closed_) return false;
  Result<> why = closed_
                     ? tl::unexpected(closed_->in(message.to_string()))
                     : fail(ErrorCode::kTimeout, fmt::format("{}: no message within {:g} s", message.to_string(),
                                                             std::chrono::duration<double>(message.timeout).count()));
  (void)mpi_.Cancel(&message.request);
  Status status{};
  int code = 0, done = 0, canceled = 0;
  const Deadline soon = Deadline::after(kCancelTime);
  while ((code = mpi_.Test(&message.request, &done, &status)) == 0 && done == 0) {
    if (soon.passed()) world_.abort(fmt::format("{}: its sender has stopped in the middle", message.to_string()));
    spin_pause();
  }
  const bool was_faster = code != 0 || (mpi_.Test_cancelled(&status, &canceled) == 0 && canceled == 0);
  end(message, was_faster ? outcome_of(message, code, status) : std::move(why), callbacks);
  return true;
}

void Messages::end(Message& message, Result<> outcome, Callbacks& callbacks) {
  for (auto& callback : message.work->finish(outcome)) {
    callbacks.emplace_back([callback = std::move(callback), outcome] { callback(outcome); });
  }
}

Result<> Messages::outcome_of(Message& message, int code, const Status& status) {
  int error_class = 0;
  if (code != 0 && mpi_.Error_class(code, &error_class) == 0 && error_class == mpi_.error_truncate) {
    return fail(ErrorCode::kMismatch, fmt::format("{}: the message is longer", message.to_string()));
  }
  if (Result<> done = mpi_.check(code, "MPI_Test"); !done) return tl::unexpected(done.error().in(message.to_string()));
  if (message.sends) return {};
  message.work->source = mpi_.source_of(status);
  int count = 0;
  MUSTER_ASSIGN(const Handle type, type_of(mpi_, message.data.dtype()));
  MUSTER_TRY(mpi_.check(mpi_.Get_count(&status, type, &count), "MPI_Get_count"));
  if (count != static_cast<int>(message.data.count())) {
    return fail(ErrorCode::kMismatch, fmt::format("{}: the message has {} elements", message.to_string(), count));
  }
  if (!message.data.contiguous()) message.data.write(0, message.packed.data(), message.packed.size());
  return {};
}

/// Needs the lock. The caller runs the callbacks without it.
Messages::Callbacks Messages::test_all() {
  const CurrentDevice device;
  Callbacks callbacks;
  std::erase_if(pending_, [&](const auto& message) { return test(*message, callbacks); });
  return callbacks;
}

void Messages::close(const Error& why, Duration time_for_sends) {
  Lock lock(mutex_);
  if (!closed_) closed_ = why;
  const TimePoint soon = Deadline::after(time_for_sends).when();
  for (const auto& message : pending_) message->deadline = std::min(message->deadline, soon);
  const Callbacks callbacks = test_all();
  lock.unlock();
  for (const auto& callback : callbacks) callback();
}

void Messages::stop() {
  PollWait wait(kPolls);
  Lock lock(mutex_);
  while (!pending_.empty()) {
    const Callbacks callbacks = test_all();
    lock.unlock();
    for (const auto& callback : callbacks) callback();
    if (!wait.idle()) spin_pause();
    lock.lock();
  }
  stopping_ = true;
  std::vector<std::thread> threads;
  threads.swap(threads_);
  lock.unlock();
  changed_.notify_all();
  for (std::thread& thread : threads) thread.join();
}

void Messages::drive(Work::State& state, const Deadline& deadline) {
  PollWait wait(kPolls);
  Lock lock(mutex_);
  ++waiting_;
  for (unsigned poll = 1; !is_finished(state); ++poll) {
    const Callbacks callbacks = test_all();
    if (callbacks.empty()) {
      lock.unlock();
      if (!wait.idle()) spin_pause();
      lock.lock();
    } else {
      // They may take long: another thread tests meanwhile.
      --waiting_;
      changed_.notify_all();
      lock.unlock();
      for (const auto& callback : callbacks) callback();
      lock.lock();
      ++waiting_;
    }
    if (poll % kPollsPerDeadline == 0 && deadline.passed()) break;
  }
  if (--waiting_ == 0) changed_.notify_all();
}

/// Needs the lock.
Result<> Messages::start_thread() {
  try {
    threads_.emplace_back([this] { run(); });
    ++free_threads_;
    return {};
  } catch (const std::system_error& error) {
    return fail(ErrorCode::kResourceExhausted, fmt::format("cannot start a thread for messages: {}", error.what()));
  }
}

void Messages::run() {
  Lock lock(mutex_);
  const auto may_test = [this] { return !polling_ && waiting_ == 0 && !pending_.empty(); };
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || may_test(); });
    if (stopping_) return;
    polling_ = true;
    Callbacks callbacks;
    while (!stopping_ && waiting_ == 0 && !pending_.empty() && (callbacks = test_all()).empty()) {
      changed_.wait_for(lock, kTestInterval, [this] { return stopping_; });
    }
    polling_ = false;
    if (callbacks.empty()) continue;
    // They may take long: another thread tests meanwhile.
    if (--free_threads_ == 0 && !stopping_) {
      if (const Result<> started = start_thread(); !started) log(LogLevel::kWarning, started.error().to_string());
    }
    changed_.notify_all();
    lock.unlock();
    for (const auto& callback : callbacks) callback();
    callbacks.clear();
    lock.lock();
    ++free_threads_;
  }
}

}  // namespace muster::mpi
