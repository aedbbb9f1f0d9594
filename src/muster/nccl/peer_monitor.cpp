#include "muster/nccl/peer_monitor.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "muster/flight/recorder_reader.h"
#include "muster/flight/report.h"

namespace muster::nccl {
namespace {

/// Of the first message to each peer in the tree, of the one that asks, and of one that never comes.
constexpr uint32_t kHelloTag = 0xffff'fff0, kAskTag = 0xffff'fff1, kNeverTag = 0xffff'fff2;
constexpr int kChildren = 4;  ///< of a rank in the tree
constexpr Duration kWatchTime = std::chrono::hours(24 * 365);
/// How long the ranks have to answer.
constexpr Duration kAnswerTime = 5s;

/// A rank's answer: the last call that it has begun.
struct Answer {
  std::array<uint64_t, 4> call;  ///< Call::pack()
  uint8_t state;                 ///< RecordState; zero: it has begun none
  uint8_t recorded;              ///< zero: its flight recorder is turned off
  char who[128];                 ///< RankState::who, which ends with a zero, like the text below
  char site[128];
};

/// Of this rank. Ranks may be threads of one process.
Answer own_answer(Rank rank, uint64_t group_id) {
  Answer answer{};
  put_text(answer.who, fmt::format("rank {} (pid {})", rank, getpid()));
  for (const Recording& recording : recordings_of(getpid())) {
    if (recording.rank != rank || recording.group_id != group_id) continue;
    put_text(answer.who, fmt::format("rank {} (host {}, pid {})", rank, recording.host, recording.pid));
    answer.recorded = 1;
    const Record* const last = recording.last_begun();
    if (last == nullptr) continue;
    answer.call = last->call.pack();
    answer.state = static_cast<uint8_t>(last->state);
    put_text(answer.site, last->site);
  }
  return answer;
}

/// The call that the ranks are in is the latest that has begun and not ended.
Report report_of(const std::vector<Answer>& answers, Rank self) {
  uint64_t current = 0;
  std::vector<RankState> states;
  for (const Answer& each : answers) {
    RankState& state = states.emplace_back(RankState{.who = text_of(each.who), .known = each.recorded != 0});
    if (each.state == 0 || each.state > static_cast<uint8_t>(RecordState::kFailed)) continue;
    state.last = Record{
        .call = Call::unpack(each.call), .state = static_cast<RecordState>(each.state), .site = text_of(each.site)};
    if (state.last->state == RecordState::kRunning) current = std::max(current, state.last->call.sequence);
  }
  for (RankState& each : states) {
    if (each.last && each.last->call.sequence == current) each.here = each.last;
  }
  return current == 0 ? Report{} : compose_report(states, self);
}

}  // namespace

Result<> PeerMonitor::connect() {
  const auto [self, size, name, generation] = host_->membership();
  if (self > 0) peers_.push_back((self - 1) / kChildren);
  for (Rank child = self * kChildren + 1; child <= (self + 1) * kChildren && child < size; ++child) {
    peers_.push_back(child);
  }
  std::vector<Work> begun;
  for (const Rank rank : peers_) {
    begun.push_back(host_->send({&sent_, 1, Dtype::kUint8}, rank, kHelloTag, {.async = true}));
    begun.push_back(host_->receive({&received_, 1, Dtype::kUint8}, rank, kHelloTag, {.async = true}));
  }
  for (const Work& each : begun) MUSTER_TRY(each.wait());
  for (const Rank rank : peers_) {
    const CallOptions options{.timeout = kWatchTime, .async = true};
    questions_.push_back(host_->receive({&received_, 1, Dtype::kUint8}, rank, kAskTag, options));
    losses_.push_back(host_->receive({&received_, 1, Dtype::kUint8}, rank, kNeverTag, options));
  }
  return {};
}

std::optional<Error> PeerMonitor::lost() const {
  for (const Work& each : losses_) {
    if (!each.done() || each.result()) continue;
    Error why = each.result().error();
    why.context.clear();  // the message is no call of the program
    return why;
  }
  return std::nullopt;
}

std::optional<Error> PeerMonitor::lost_for(Duration time) {
  const std::optional<Error> why = lost();
  if (!why) return std::nullopt;
  if (!lost_since_) lost_since_ = steady_clock().now();
  return steady_clock().now() - *lost_since_ >= time ? why : std::nullopt;
}

bool PeerMonitor::asked() const {
  return std::ranges::any_of(questions_, [](const Work& each) { return each.done() && each.result(); });
}

void PeerMonitor::ask() {
  for (const Rank rank : peers_) (void)host_->send({&sent_, 1, Dtype::kUint8}, rank, kAskTag, {.async = true});
}

Error PeerMonitor::explain_timeout() {
  Error error{ErrorCode::kTimeout, "it has not ended on the device within its timeout", kNoRank, {}};
  ask();
  const auto [self, size, name, generation] = host_->membership();
  Answer own = own_answer(self, group_id_);
  std::vector<Answer> answers(static_cast<size_t>(size));
  const Result<> answered =
      host_
          ->all_gather({&own, sizeof own, Dtype::kUint8}, {answers.data(), answers.size() * sizeof own, Dtype::kUint8},
                       {.timeout = kAnswerTime})
          .wait();
  if (!answered) {
    Error why = answered.error();
    why.context.clear();                         // the call is none of the program's
    if (why.reported_by != kNoRank) return why;  // a rank was quicker
    error.rank = why.rank;
    error.message += ", and not all ranks say which call they are in: " + why.message;
    return error;
  }
  const Report report = report_of(answers, self);
  error.rank = report.culprit;
  if (report.text.empty()) {
    error.message += "; no rank is known to be late";
  } else {
    error.message += "; " + report.text;
  }
  if (report.mismatch) {
    error.code = ErrorCode::kMismatch;
    error.message += "; all ranks must make the same calls in the same order";
  }
  return error;
}

}  // namespace muster::nccl
