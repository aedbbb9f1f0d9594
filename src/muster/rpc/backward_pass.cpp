#include "muster/rpc/backward_pass.h"

#include <fmt/format.h>

#include <utility>

namespace muster::rpc {

BackwardPass::BackwardPass(std::unique_ptr<LocalGraph> graph, Peers sent, Peers received)
    : graph_(std::move(graph)), waiting_(std::move(sent)), owed_(std::move(received)) {}

void BackwardPass::receive(const std::string& from, std::optional<LocalGraph::Gradients> answer,
                           const std::vector<MessageId>& expected) {
  contacted_.insert(from);
  if (answer && waiting_.erase(answer->message) != 0) arrived_.push_back(std::move(*answer));
  for (const MessageId& message : expected) add_late(message, from);
}

void BackwardPass::add_late(MessageId message, const std::string& from) {
  if (owed_.contains(message) || answered_.contains(message)) return;
  owed_.emplace(message, from);
  answer(message, {});
}

std::optional<std::vector<LocalGraph::Gradients>> BackwardPass::begin_run() {
  if (running_ || (started_ && arrived_.empty())) return std::nullopt;
  running_ = started_ = true;
  return std::exchange(arrived_, {});
}

void BackwardPass::end_run(std::vector<LocalGraph::Gradients> answers) {
  running_ = false;
  for (auto& each : answers) answer(each.message, std::move(each.gradients));
  if (arrived_.empty()) ask(false);
}

void BackwardPass::answer(MessageId message, Message gradients) {
  const auto owed = owed_.extract(message);
  if (owed.empty()) return;
  answered_.insert(message);
  contacted_.insert(owed.mapped());
  parts_.push_back({owed.mapped(), LocalGraph::Gradients{message, std::move(gradients)}, {}});
}

void BackwardPass::ask_again() {
  if (started_ && !running_) ask(true);
}

void BackwardPass::ask(bool everyone) {
  std::map<std::string, std::vector<MessageId>> expected;
  for (const auto& [message, to] : waiting_) {
    if (everyone || !contacted_.contains(to)) expected[to].push_back(message);
  }
  for (auto& [to, messages] : expected) {
    contacted_.insert(to);
    parts_.push_back({to, std::nullopt, std::move(messages)});
  }
}

std::optional<BackwardPass::Part> BackwardPass::next_part() {
  if (parts_.empty()) return std::nullopt;
  Part part = std::move(parts_.front());
  parts_.erase(parts_.begin());
  ++unacknowledged_;
  return part;
}

BackwardPass::Part BackwardPass::take_last_part() {
  Part part = std::move(parts_.front());
  parts_.clear();
  return part;
}

std::set<std::string> BackwardPass::peers() const {
  std::set<std::string> peers = contacted_;
  for (const auto& [message, to] : waiting_) peers.insert(to);
  for (const auto& [message, from] : owed_) peers.insert(from);
  return peers;
}

std::string BackwardPass::missing() const {
  std::map<std::string, int> count;
  for (const auto& [message, to] : waiting_) ++count[to];
  std::string text;
  for (const auto& [worker, answers] : count) {
    text += fmt::format("{}worker \"{}\" ({} answers)", text.empty() ? "" : ", ", worker, answers);
  }
  return text;
}

}  // namespace muster::rpc
