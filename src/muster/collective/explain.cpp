#include "muster/collective/explain.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/collective/cost.h"
#include "muster/collective/evaluation.h"

namespace muster {
namespace {

constexpr size_t kElementBytes = 4;
/// Steps of all ranks: beyond, playing them through takes too long for somebody who waits.
constexpr size_t kMostPlayed = size_t{1} << 20;

std::string readable_time(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  return seconds < 1 ? fmt::format("{:.2f} ms", seconds * 1e3) : fmt::format("{:.2f} s", seconds);
}

std::string readable_bytes(size_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB"};
  size_t unit = 0;
  for (; unit < 3 && bytes >= 1024 && bytes % 1024 == 0; ++unit) bytes /= 1024;
  return fmt::format("{} {}", bytes, kUnits[unit]);
}

bool in_blocks(Collective collective) {
  return collective == Collective::kAllGather || collective == Collective::kReduceScatter ||
         collective == Collective::kScatter || collective == Collective::kGather || collective == Collective::kAllToAll;
}

/// Whether groups over several nodes run it in two levels (group/hierarchy.h).
bool has_levels(Collective collective) {
  return collective != Collective::kScatter && collective != Collective::kGather && collective != Collective::kAllToAll;
}

Problem flat(const Question& question) {
  Problem problem{.collective = question.collective, .rank = question.rank, .size = question.ranks};
  problem.element_bytes = kElementBytes;
  problem.root = question.root;
  problem.count = question.bytes / kElementBytes / (in_blocks(question.collective) ? question.ranks : 1);
  return problem;
}

/// What each of a node's ranks does with its counterparts on the other nodes: its share of a tensor, or its block.
Problem between_nodes(const Question& question) {
  Problem problem = flat(question);
  const int locals = question.ranks / question.nodes;
  problem.size = question.nodes;
  problem.rank = question.rank / locals;
  problem.root = question.root / locals;
  if (!in_blocks(question.collective)) problem.count /= locals;
  return problem;
}

std::string candidates(const Problem& problem) {
  std::string text;
  const Algorithm* chosen = choose(problem);
  for (const Algorithm& algorithm : algorithms(problem.collective)) {
    if (!fits(algorithm, problem)) continue;
    text += fmt::format("  {} {:<20} {:>12}\n", &algorithm == chosen ? "->" : "  ", algorithm.name,
                        readable_time(predict(problem, algorithm)));
  }
  if (problem.algorithm == chosen) text += "  (MUSTER_ALGO asks for it)\n";
  if (chosen->schedule(problem).steps.size() * static_cast<size_t>(problem.size) > kMostPlayed) return text;
  std::vector<Schedule> schedules;
  Problem of_rank = problem;
  for (of_rank.rank = 0; of_rank.rank < problem.size; ++of_rank.rank) schedules.push_back(chosen->schedule(of_rank));
  return text + fmt::format("  step by step, {} takes {}\n", chosen->name,
                            readable_time(evaluate(schedules, problem.network)));
}

std::string steps_of(const Question& question, const Problem& problem) {
  const Schedule schedule = choose(problem)->schedule(problem);
  std::string text = to_string(schedule);
  const size_t shown = std::min(question.most_steps, schedule.steps.size());
  size_t end = 0;
  for (size_t line = 0; line < shown; ++line) end = text.find('\n', end) + 1;
  text.resize(end);
  if (shown < schedule.steps.size()) text += fmt::format("... and {} more\n", schedule.steps.size() - shown);
  const char* where = problem.size == question.ranks ? "rank" : "the node of rank";
  return fmt::format("steps of {} {}, with {} of scratch:\n{}", where, question.rank,
                     readable_bytes(schedule.scratch_bytes), text);
}

Result<> check(const Question& question) {
  const auto wrong = [](std::string what) { return fail(ErrorCode::kInvalidArgument, std::move(what)); };
  if (question.ranks < 1 || question.ranks > 1 << 16) return wrong("ranks are 1 to 65536");
  if (question.nodes < 1 || question.ranks % question.nodes != 0) return wrong("every node has as many ranks");
  if (question.rank < 0 || question.rank >= question.ranks) return wrong("the rank is one of the ranks");
  if (question.root < 0 || question.root >= question.ranks) return wrong("the root is one of the ranks");
  if (question.kind != "tcp" && question.kind != "unix" && question.kind != "shm") {
    return wrong("links are of the kind tcp, unix or shm");
  }
  return {};
}

}  // namespace

Result<std::string> explain(const Question& question, const Tuning& tuning) {
  MUSTER_TRY(check(question));
  const int locals = question.ranks / question.nodes;
  const bool levels = question.nodes > 1 && locals > 1 && has_levels(question.collective);
  Problem problem = levels ? between_nodes(question) : flat(question);
  tuning.apply(problem, question.kind, locals);
  std::string text =
      fmt::format("{} of {} on {} ranks, {} node{}, links: {}; costs of this machine: {}\n", name(question.collective),
                  readable_bytes(question.bytes), question.ranks, question.nodes, question.nodes == 1 ? "" : "s",
                  question.kind, tuning.machine.measured ? "measured" : "guessed (`muster tune` measures them)");
  if (levels) {
    text += fmt::format(
        "in two levels: within a node through shared memory; between the nodes each of the {} ranks of a node\n"
        "carries its part, so that no byte crosses twice. Between {} nodes:\n",
        locals, question.nodes);
  } else if (question.nodes == 1) {
    text += "ranks that share a host's memory use no links; where they do (MUSTER_TRANSPORT=unix,tcp):\n";
  }
  return text + candidates(problem) + steps_of(question, problem);
}

Result<Collective> collective_named(std::string_view wanted) {
  std::string names;
  for (int number = 1; number < kCollectiveCount; ++number) {
    const auto collective = static_cast<Collective>(number);
    if (wanted == name(collective)) return collective;
    names += (names.empty() ? "" : ", ") + std::string(name(collective));
  }
  return fail(ErrorCode::kInvalidArgument, fmt::format("'{}' is no collective: choose from {}", wanted, names));
}

}  // namespace muster
