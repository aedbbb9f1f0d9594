#include "store/linear_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <unordered_set>

#include "muster/base/random.h"
#include "store/store_model.h"

namespace muster {
namespace {

using Part = std::vector<const Call*>;

std::string quoted(ByteView bytes) {
  return bytes.size() <= 40 ? fmt::format("\"{}\"", to_string(bytes)) : format_bytes(bytes.size());
}

std::string describe_call(const Call& call) {
  std::string asked;
  for (const Key& key : call.request.keys) asked += fmt::format(" {}", key);
  for (const Bytes& value : call.request.values) asked += fmt::format(" {}", quoted(value));
  if (call.request.number != 0) asked += fmt::format(" {}", call.request.number);
  const std::string head = fmt::format("client {} {}{}{} [{}, ", call.client, name(call.request.operation),
                                       call.request.immediate ? " (immediate)" : "", asked, call.invoked.ns);
  if (!call.reply) return head + "never] -> unknown";
  const Reply& reply = *call.reply;
  if (!reply.status) return fmt::format("{}{}] -> {}", head, call.returned.ns, reply.status.error().to_string());
  std::string answer = fmt::format("{}", reply.number);
  for (const Bytes& value : reply.values) answer += fmt::format(" {}", quoted(value));
  for (const Key& key : reply.keys) answer += fmt::format(" {}", key);
  return fmt::format("{}{}] -> {}", head, call.returned.ns, answer);
}

// True if the call, with the answer that it got, did not change the store.
bool only_looked(const Call& call) {
  if (!call.reply) return false;
  if (!changes(call.request.operation) || !call.reply->status) return true;
  if (call.request.operation == StoreOperation::kDelete) return call.reply->number == 0;
  return call.request.operation == StoreOperation::kCompareSet && call.reply->values[0] != call.request.values[1];
}

// For each push, returns the pushes that must come before it, because their elements were popped before its own
// element. Without this, the search would notice a wrong order of pushes only at the pops, much later.
std::vector<std::vector<size_t>> earlier_pushes(const Part& calls) {
  std::vector<std::vector<size_t>> earlier(calls.size());
  std::map<std::pair<Key, Bytes>, const Call*> taken;
  bool all_known = true;
  for (const Call* call : calls) {
    if (call->request.operation != StoreOperation::kQueuePop) continue;
    all_known = all_known && call->reply;
    if (call->reply && !call->reply->values.empty()) taken[{call->request.keys[0], call->reply->values[0]}] = call;
  }
  const auto pop_of = [&](const Call* call) -> const Call* {
    if (call->request.operation != StoreOperation::kQueuePush) return nullptr;
    const auto found = taken.find({call->request.keys[0], call->request.values[0]});
    return found == taken.end() ? nullptr : found->second;
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    const Call* mine = pop_of(calls[i]);
    const bool never = mine == nullptr && all_known && calls[i]->request.operation == StoreOperation::kQueuePush;
    for (size_t j = 0; j < calls.size() && (mine != nullptr || never); ++j) {
      const Call* other = calls[j]->request.keys == calls[i]->request.keys ? pop_of(calls[j]) : nullptr;
      if (other != nullptr && (never || other->returned < mine->invoked)) earlier[i].push_back(j);
    }
  }
  return earlier;
}

// The search over one part. It places one call after the other. When no call fits, it removes the last placed call and
// tries another one.
class Search {
 public:
  Search(Part calls, size_t max_steps) : calls_(std::move(calls)), steps_left_(max_steps), placed_(calls_.size()) {
    std::stable_sort(calls_.begin(), calls_.end(), [](auto* a, auto* b) { return a->invoked < b->invoked; });
    for (const Call* call : calls_) {
      answered_ += call->reply.has_value();
      bits_.push_back({random_.next(), random_.next()});
    }
    earlier_ = earlier_pushes(calls_);
  }

  Result<> run() {
    std::vector<size_t> candidates = possible_next();
    while (answered_ > 0) {
      while (!place_one_of(candidates)) {
        if (steps_left_ == 0) return fail(ErrorCode::kResourceExhausted, "no answer within the steps allowed");
        note_stuck(candidates);
        if (levels_.empty()) return explain();
        candidates = take_back();
      }
      candidates = possible_next();
    }
    return {};
  }

 private:
  struct Level {
    size_t call;
    StoreModel before;
    std::vector<size_t> others;  // other candidates for this place that were not tried yet
  };
  struct Hash128 {
    uint64_t a = 0, b = 0;
    friend bool operator==(const Hash128&, const Hash128&) = default;
  };
  struct Fold {
    size_t operator()(const Hash128& hash) const { return hash.a; }
  };

  // Returns the calls that may come next: those that were invoked before any other call that is not placed yet
  // returned.
  std::vector<size_t> possible_next() {
    while (first_ < calls_.size() && placed_[first_]) ++first_;
    std::vector<size_t> found;
    int64_t end = INT64_MAX;
    for (size_t i = first_; i < calls_.size() && calls_[i]->invoked.ns <= end; ++i) {
      if (placed_[i]) continue;
      found.push_back(i);
      if (calls_[i]->reply) end = std::min(end, calls_[i]->returned.ns);
    }
    // Any order of attempts is correct, but a good order finds the result sooner. Calls that returned early are tried
    // first, and calls without a reply last.
    const auto due = [&](size_t i) { return calls_[i]->reply ? calls_[i]->returned.ns : INT64_MAX; };
    std::stable_sort(found.begin(), found.end(), [&](size_t a, size_t b) { return due(a) < due(b); });
    return found;
  }

  bool place_one_of(std::vector<size_t>& candidates) {
    // A read that fits the current state can be placed now, because it does not change the state: no other order can be
    // better.
    for (const size_t index : candidates) {
      if (!only_looked(*calls_[index]) || !fits(index)) continue;
      candidates.clear();
      return place(index);
    }
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (!fits(candidates[i]) || !place(candidates[i])) continue;
      levels_.back().others.assign(candidates.begin() + static_cast<ptrdiff_t>(i) + 1, candidates.end());
      return true;
    }
    return false;
  }

  // True if the call, when it comes next, gives what the client saw. Sets after_ to the state after the call.
  bool fits(size_t index) {
    const Call& call = *calls_[index];
    const auto is_placed = [&](size_t other) { return placed_[other]; };
    if (!std::all_of(earlier_[index].begin(), earlier_[index].end(), is_placed)) return false;
    after_ = state_;
    const auto expected = after_.apply(call.request);
    return expected && (!call.reply || same_answer(call.request, *expected, *call.reply));
  }

  // Places the call, which must fit. False if the same calls in another order have already led to the same state, or if
  // no steps are left.
  bool place(size_t index) {
    if (steps_left_ == 0) return false;
    --steps_left_;
    const Hash128 set{set_.a ^ bits_[index].a, set_.b ^ bits_[index].b};
    const uint64_t content = std::hash<std::string>()(after_.fingerprint());
    if (!seen_.insert({set.a ^ content, set.b + content}).second) return false;
    levels_.push_back({index, std::move(state_), {}});
    state_ = std::move(after_);
    set_ = set;
    placed_[index] = true;
    answered_ -= calls_[index]->reply.has_value();
    return true;
  }

  // Removes the last placed call. Returns the candidates that are left to try in its place.
  std::vector<size_t> take_back() {
    Level level = std::move(levels_.back());
    levels_.pop_back();
    state_ = std::move(level.before);
    set_ = {set_.a ^ bits_[level.call].a, set_.b ^ bits_[level.call].b};
    placed_[level.call] = false;
    first_ = std::min(first_, level.call);
    answered_ += calls_[level.call]->reply.has_value();
    return std::move(level.others);
  }

  void note_stuck(const std::vector<size_t>& candidates) {
    if (candidates.empty() || levels_.size() < furthest_.size()) return;
    furthest_.clear();
    for (const Level& level : levels_) furthest_.push_back(level.call);
    stuck_ = candidates;
  }

  std::string list(const std::vector<size_t>& calls, size_t from) const {
    std::string text;
    for (size_t i = from; i < calls.size(); ++i) text += fmt::format("\n  {}", describe_call(*calls_[calls[i]]));
    return text;
  }

  Result<> explain() const {
    const size_t count = furthest_.size();
    return fail(
        ErrorCode::kMismatch,
        fmt::format("no order of {} calls explains what clients saw; {} were put in order, the last of them{}\n"
                    "and then came one of these, but none explains what it saw{}",
                    calls_.size(), count, list(furthest_, count - std::min<size_t>(count, 8)), list(stuck_, 0)));
  }

  Part calls_;  // in the order of their invocations
  size_t steps_left_;
  std::vector<bool> placed_;
  size_t first_ = 0;     // all calls before this index are placed
  size_t answered_ = 0;  // number of calls with a reply that are not placed yet
  std::vector<std::vector<size_t>> earlier_;
  Random random_{1};
  std::vector<Hash128> bits_;
  StoreModel state_, after_;
  Hash128 set_;  // hash of the set of placed calls
  std::vector<Level> levels_;
  std::unordered_set<Hash128, Fold> seen_;
  std::vector<size_t> furthest_, stuck_;
};

// Splits a history into parts without common keys. The keys of one call belong to one part. A num_keys or list_keys
// call joins all parts into one.
class Parts {
 public:
  explicit Parts(const History& history) {
    for (const Call& call : history) {
      if (call.request.operation == StoreOperation::kBarrier) continue;
      if (!call.reply && !changes(call.request.operation)) continue;  // a read without a reply proves nothing
      calls_.push_back(&call);
      for (const Key& key : call.request.keys) join(number_of(key), number_of(first_key(call)));
      const bool of_all =
          call.request.operation == StoreOperation::kNumKeys || call.request.operation == StoreOperation::kListKeys;
      joined_ = joined_ || of_all;
    }
  }

  std::vector<Part> take() {
    std::map<size_t, Part> parts;
    for (const Call* call : calls_) {
      parts[joined_ || call->request.keys.empty() ? 0 : find(number_of(first_key(*call)))].push_back(call);
    }
    std::vector<Part> all;
    for (auto& [root, part] : parts) all.push_back(std::move(part));
    return all;
  }

 private:
  static const Key& first_key(const Call& call) { return call.request.keys.front(); }
  size_t number_of(const Key& key) {
    const auto [found, fresh] = numbers_.try_emplace(key, parent_.size());
    if (fresh) parent_.push_back(found->second);
    return found->second;
  }
  size_t find(size_t key) {
    while (parent_[key] != key) key = parent_[key] = parent_[parent_[key]];
    return key;
  }
  void join(size_t a, size_t b) { parent_[find(a)] = find(b); }

  std::vector<const Call*> calls_;
  std::map<Key, size_t> numbers_;
  std::vector<size_t> parent_;
  bool joined_ = false;
};

// Checks the barriers of one key. Each round has `count` callers whose calls overlap at one moment. When the first
// caller returns, its round must be complete. The callers that return next belong to the same round. A caller whose
// return is unknown may wait forever, so it is used last.
Result<> check_barrier(Part calls) {
  const auto end = [](const Call* call) { return call->reply ? call->returned.ns : INT64_MAX; };
  std::sort(calls.begin(), calls.end(), [&](const Call* a, const Call* b) { return end(a) < end(b); });
  while (!calls.empty() && calls.front()->reply) {
    const Call& first = *calls.front();
    auto wanted = first.request.number;
    const auto takes_part = [&](const Call* call) {
      return wanted > 0 && call->request.number == first.request.number && call->invoked.ns <= end(&first) && wanted--;
    };
    calls.erase(std::remove_if(calls.begin(), calls.end(), takes_part), calls.end());
    if (wanted > 0) {
      return fail(ErrorCode::kMismatch,
                  fmt::format("a barrier lacked {} caller(s) when it released {}", wanted, describe_call(first)));
    }
  }
  return {};
}

Result<> check_barriers(const History& history) {
  std::map<Key, Part> barriers;
  for (const Call& call : history) {
    if (call.request.operation != StoreOperation::kBarrier) continue;
    // A call that failed was in no round.
    if (!call.reply || call.reply->status) barriers[call.request.keys[0]].push_back(&call);
  }
  for (auto& [key, calls] : barriers) MUSTER_TRY(check_barrier(std::move(calls)));
  return {};
}

}  // namespace

Result<> check_history(const History& history, size_t max_steps) {
  MUSTER_TRY(check_barriers(history));
  for (const Part& part : Parts(history).take()) MUSTER_TRY(Search(part, max_steps).run());
  return {};
}

}  // namespace muster
