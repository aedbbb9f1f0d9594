#include "muster/rpc/log/call_log.h"

#include <algorithm>
#include <functional>
#include <new>
#include <numeric>

#include "muster/flight/recorder.h"
#include "muster/rpc/log/call_log_layout.h"

namespace muster::rpc {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr uint64_t kStateMask = 0xffff;  ///< of CallEntry::what: the state and the error

/// Adds to a counter that only one thread writes at a time.
template <class T>
void add(std::atomic<T>& counter, T value) {
  counter.store(counter.load(kRelaxed) + value, kRelaxed);
}

void set_state(CallEntry& entry, RecordState state, ErrorCode error = {}) {
  const uint64_t rest = entry.what.load(kRelaxed) & ~kStateMask;
  entry.what.store(rest | static_cast<uint64_t>(state) | static_cast<uint64_t>(error) << 8, std::memory_order_release);
}

/// The end of a text: that of a qualified name says most.
template <size_t kSize>
void put_end_of_text(char (&to)[kSize], std::string_view text) {
  put_text(to, text.substr(text.size() - std::min(text.size(), kSize - 1)));
}

}  // namespace

CallLog::CallLog(size_t calls, const std::string& group, uint64_t group_id, const std::string& worker, int worker_id)
    : memory_(calls == 0 ? std::nullopt
                         : ProcessMemory::create(kCallLogName, call_log_bytes(std::min(calls, kMaxCallEntries)))) {
  if (!memory_) return;
  // The kernel has zeroed this memory, and zero is the initial value of all fields.
  header_ = new (memory_->data()) CallLogHeader{};
  functions_ = reinterpret_cast<FunctionEntry*>(header_ + 1);
  calls_ = reinterpret_cast<CallEntry*>(memory_->data() + calls_offset());
  calls = std::min(calls, kMaxCallEntries);
  header_->calls = static_cast<uint32_t>(calls);
  header_->worker_id = worker_id;
  header_->group_id = group_id;
  put_text(header_->group, group);
  put_text(header_->worker, worker);
  memory_->publish(kCallLogMagic);
  free_.resize(calls);
  free_count_ = calls;
  std::iota(free_.begin(), free_.end(), 0U);
}

size_t CallLog::Hash::operator()(const Name& name) const {
  const std::hash<std::string_view> hash;
  return hash(name.function) * 31 + hash(name.peer) * 2 + static_cast<size_t>(name.side);
}

/// The index of the entry for a function at a peer.
uint32_t CallLog::function_entry(const Name& name) {
  if (const auto found = indexes_.find(name); found != indexes_.end()) return found->second;
  const uint32_t used = header_->functions.load(kRelaxed);
  const uint32_t rest = kMaxFunctionEntries - 2;
  if (used > rest) return name.side == CallSide::kCaller ? rest : rest + 1;
  if (used == rest) {
    fill(functions_[rest], {CallSide::kCaller, "(all other functions)", "(any)"});
    fill(functions_[rest + 1], {CallSide::kCallee, "(all other functions)", "(any)"});
    header_->functions.store(kMaxFunctionEntries, std::memory_order_release);
    return function_entry(name);
  }
  fill(functions_[used], name);
  header_->functions.store(used + 1, std::memory_order_release);
  indexes_.emplace(StoredName{name.side, std::string(name.function), std::string(name.peer)}, used);
  return used;
}

void CallLog::fill(FunctionEntry& entry, const Name& name) {
  entry.side = static_cast<uint32_t>(name.side);
  put_end_of_text(entry.function, name.function);
  put_end_of_text(entry.peer, name.peer);
}

/// Null if no call of the log has ended.
CallEntry* CallLog::take_entry() {
  if (free_count_ == 0) return nullptr;
  CallEntry& entry = calls_[free_[first_free_]];
  first_free_ = first_free_ + 1 == free_.size() ? 0 : first_free_ + 1;
  --free_count_;
  entry.number.store(0, kRelaxed);  // readers skip it until the new number is stored
  std::atomic_thread_fence(std::memory_order_release);
  return &entry;
}

LoggedCall CallLog::begin(CallSide side, std::string_view function, std::string_view peer, uint64_t request_bytes) {
  if (!memory_) return {};
  const uint32_t index = function_entry({side, function, peer});
  LoggedCall call{&functions_[index], take_entry(), ticks(header_->process.tick_kind)};
  add(call.function->begun, uint64_t{1});
  add(call.function->request_bytes, request_bytes);
  if (call.entry == nullptr) return call;
  CallEntry& entry = *call.entry;
  entry.what.store(static_cast<uint64_t>(RecordState::kQueued) | uint64_t{index} << 16 | uint64_t{UINT32_MAX} << 32,
                   kRelaxed);
  entry.request.store(0, kRelaxed);
  entry.request_bytes.store(request_bytes, kRelaxed);
  entry.reply_bytes.store(0, kRelaxed);
  entry.begun.store(call.begun, kRelaxed);
  entry.started.store(0, kRelaxed);
  entry.ended.store(0, kRelaxed);
  entry.number.store(++last_number_, std::memory_order_release);
  return call;
}

void CallLog::set_request(const LoggedCall& call, int peer_id, uint64_t request) {
  if (call.entry == nullptr) return;
  call.entry->request.store(request, kRelaxed);
  const uint64_t rest = call.entry->what.load(kRelaxed) & UINT32_MAX;
  call.entry->what.store(rest | uint64_t{static_cast<uint32_t>(peer_id)} << 32, std::memory_order_release);
}

void CallLog::started(const LoggedCall& call) const {
  if (call.entry == nullptr) return;
  call.entry->started.store(ticks(header_->process.tick_kind), kRelaxed);
  set_state(*call.entry, RecordState::kRunning);
}

void CallLog::end(LoggedCall& call, const CallResult& result) {
  if (call.function == nullptr) return;
  const int64_t now = ticks(header_->process.tick_kind);
  const uint64_t reply_bytes = result ? result->footprint() : 0;
  FunctionEntry& function = *std::exchange(call.function, nullptr);
  add(function.ended, uint64_t{1});
  add(function.failed, uint64_t{result ? 0U : 1U});
  add(function.reply_bytes, reply_bytes);
  add(function.latencies[bucket_of(static_cast<uint64_t>(std::max<int64_t>(now - call.begun, 0)))], uint32_t{1});
  if (call.entry == nullptr) return;
  CallEntry& entry = *std::exchange(call.entry, nullptr);
  entry.reply_bytes.store(reply_bytes, kRelaxed);
  entry.ended.store(now, kRelaxed);
  set_state(entry, result ? RecordState::kDone : RecordState::kFailed,
            result ? ErrorCode{} : result.error().error.code);
  const size_t last = first_free_ + free_count_++;
  free_[last < free_.size() ? last : last - free_.size()] = static_cast<uint32_t>(&entry - calls_);
}

}  // namespace muster::rpc
