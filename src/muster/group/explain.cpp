#include "muster/group/explain.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "muster/base/bytes.h"
#include "muster/collective/cost/cost.h"
#include "muster/collective/schedule/evaluation.h"
#include "muster/group/engine/hierarchy.h"
#include "muster/group/engine/hierarchy_plan.h"

namespace muster {
namespace {

constexpr size_t kElementBytes = 4;
/// Above this number of steps over all ranks, evaluating them one by one takes too long for an interactive command.
constexpr size_t kMaxEvaluatedSteps = size_t{1} << 20;

std::string readable_time(double seconds) {
  if (seconds < 1e-5) return fmt::format("{:.2f} us", seconds * 1e6);
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  return seconds < 1 ? fmt::format("{:.2f} ms", seconds * 1e3) : fmt::format("{:.2f} s", seconds);
}

std::string candidates(const CollectiveSpec& problem) {
  std::string text;
  const Algorithm* chosen = choose(problem);
  for (const Algorithm& algorithm : algorithms(problem.collective)) {
    if (!fits(algorithm, problem)) continue;
    text += fmt::format("  {} {:<20} {:>12}\n", &algorithm == chosen ? "->" : "  ", algorithm.name,
                        readable_time(predict(problem, algorithm)));
  }
  if (problem.algorithm == chosen) text += "  (MUSTER_ALGO asks for it)\n";
  if (chosen->schedule(problem).steps.size() * static_cast<size_t>(problem.size) > kMaxEvaluatedSteps) return text;
  std::vector<Schedule> schedules;
  CollectiveSpec of_rank = problem;
  for (of_rank.rank = 0; of_rank.rank < problem.size; ++of_rank.rank) schedules.push_back(chosen->schedule(of_rank));
  return text +
         fmt::format("  step by step, {} takes {}\n", chosen->name, readable_time(evaluate(schedules, problem.costs)));
}

std::string steps_of(const Question& question, const CollectiveSpec& problem) {
  Schedule schedule = choose(problem)->schedule(problem);
  const size_t steps = schedule.steps.size(), shown = std::min(question.max_steps, steps);
  schedule.steps.resize(shown);
  std::string text = to_string(schedule);
  if (shown < steps) text += fmt::format("... and {} more\n", steps - shown);
  const char* where = problem.size == question.ranks ? "rank" : "the node of rank";
  return fmt::format("steps of {} {}, with {} of scratch:\n{}", where, question.rank,
                     format_bytes(schedule.scratch_bytes), text);
}

Result<> check(const Question& question) {
  const auto wrong = [](std::string what) { return fail(ErrorCode::kInvalidArgument, std::move(what)); };
  if (question.ranks < 1 || question.ranks > 1 << 16) return wrong("ranks are 1 to 65536");
  if (question.nodes < 1 || question.ranks % question.nodes != 0)
    return wrong("the number of ranks must be a multiple of the number of nodes");
  if (question.rank < 0 || question.rank >= question.ranks) return wrong("the rank is out of range");
  if (question.root < 0 || question.root >= question.ranks) return wrong("the root is out of range");
  if (!question.kind.empty() && question.kind != "tcp" && question.kind != "unix" && question.kind != "shm") {
    return wrong("links are of the kind tcp, unix or shm");
  }
  return {};
}

std::string heading(const Question& question, const std::string& ways, bool measured) {
  const std::string what = question.collective == Collective::kBarrier ? "" : " of " + format_bytes(question.bytes);
  return fmt::format("{}{} on {} rank{}, {} node{}, {}; costs of this machine: {}\n", name(question.collective), what,
                     question.ranks, question.ranks == 1 ? "" : "s", question.nodes, question.nodes == 1 ? "" : "s",
                     ways, measured ? "measured" : "defaults (`muster tune` measures them)");
}

std::string on_links(const Question& question) { return "links: " + (question.kind.empty() ? "tcp" : question.kind); }

/// The chunks, waits, copies and steps of a form, as indented lines.
std::string lines_of(const HostPlan& plan) {
  std::string text = "    ";
  if (plan.chunks > 1) text += fmt::format("{} chunks of {}, ", plan.chunks, format_bytes(plan.chunk));
  text += fmt::format("{} wait{}", plan.waits, plan.waits == 1 ? "" : "s");
  if (plan.copied > 0) text += fmt::format(", {} copied by a rank", format_bytes(static_cast<uint64_t>(plan.copied)));
  if (plan.combined > 0) text += fmt::format(", {} combined", format_bytes(static_cast<uint64_t>(plan.combined)));
  text += '\n';
  for (size_t begin = 0, end; begin < plan.steps.size(); begin = end + 1) {
    end = plan.steps.find('\n', begin);
    text += "    " + plan.steps.substr(begin, end - begin) + '\n';
  }
  return text;
}

std::string in_memory(const Question& question, const Tuning& tuning, const CollectiveSpec& problem) {
  HostPlanInputs ask{.collective = question.collective,
                     .bytes = problem.count * kElementBytes,
                     .ranks = question.ranks,
                     .cores = tuning.machine.cores,
                     .element = kElementBytes};
  const auto told = [&](const char* where) {
    const HostPlan plan = plan_on_host(ask);
    return fmt::format("  {}{}: {}\n{}", where, plan.form, readable_time(predict(plan, ask, tuning.machine)),
                       lines_of(plan));
  };
  std::string text = heading(question, "through shared memory", tuning.machine.memory.measured) + told("");
  ask.direct = goes_direct(ask);
  if (ask.direct) text += told("where all tensors lie in the group's arena (allocate_tensor, muster.nn), ");
  if (const Algorithm* wanted = tuning.wanted[static_cast<size_t>(question.collective)]) {
    text += fmt::format("  (MUSTER_ALGO asks for {}, an algorithm of links: here there are none)\n", wanted->name);
  }
  return text;
}

std::string in_levels(const Question& question, const Tuning& tuning, const CollectiveSpec& problem, int locals) {
  const HierarchyPlan plan = plan_hierarchy(problem, locals, tuning.machine.cores);
  const auto within = [&](const std::optional<HostPlanInputs>& part, double& seconds) -> std::string {
    if (!part) return {};
    const HostPlan form = plan_on_host(*part);
    seconds = predict(form, *part, tuning.machine);
    const bool there = has_root(question.collective) && part->collective != Collective::kReduceScatter &&
                       part->collective != Collective::kAllGather;
    return fmt::format("  within {} node, {}, {}: {}\n{}", there ? "the root's" : "a", name(part->collective),
                       form.form, readable_time(seconds), lines_of(form));
  };
  double before = 0, after = 0;
  const std::string first = within(plan.before, before), last = within(plan.after, after);
  const Algorithm* chosen = choose(plan.across);
  const double across = predict(plan.across, *chosen);
  const std::string who = question.collective == Collective::kBarrier
                              ? "one rank of each node"
                              : fmt::format("each of a node's {} ranks with its part", locals);
  std::string text = heading(question, "shared memory within a node, " + on_links(question) + " between nodes",
                             tuning.machine.measured && tuning.machine.memory.measured) +
                     first +
                     fmt::format("  between nodes, {}, {} by {}: {}\n", name(question.collective), chosen->name, who,
                                 readable_time(across)) +
                     last + fmt::format("  in all: {}", readable_time(plan.total(before, across, after)));
  if (plan.chunks > 1) {
    text += fmt::format(", because the tensor is sent in {:.0f} chunks of {}, and the table is for one",
                        std::ceil(plan.chunks), format_bytes(plan.chunk));
  }
  return text + "\nbetween nodes:\n" + candidates(plan.across) + steps_of(question, plan.across);
}

}  // namespace

bool is_in_blocks(Collective collective) {
  return collective == Collective::kAllGather || collective == Collective::kReduceScatter ||
         collective == Collective::kScatter || collective == Collective::kGather || collective == Collective::kAllToAll;
}

Result<CollectiveSpec> spec_over_links(const Question& question, const Tuning& tuning) {
  MUSTER_TRY(check(question));
  const size_t parts = kElementBytes * (is_in_blocks(question.collective) ? question.ranks : 1);
  CollectiveSpec spec{.collective = question.collective,
                      .rank = question.rank,
                      .size = question.ranks,
                      .count = question.collective == Collective::kBarrier ? 0 : (question.bytes + parts - 1) / parts,
                      .element_bytes = kElementBytes,
                      .root = question.root};
  tuning.apply(spec, question.kind, question.ranks / question.nodes);
  return spec;
}

Result<std::string> explain(const Question& question, const Tuning& tuning) {
  MUSTER_ASSIGN(const CollectiveSpec spec, spec_over_links(question, tuning));
  const int locals = question.ranks / question.nodes;
  if (locals > 1 && question.nodes == 1 && question.kind.empty()) return in_memory(question, tuning, spec);
  if (locals > 1 && question.nodes > 1 && Hierarchy::has(question.collective)) {
    return in_levels(question, tuning, spec, locals);
  }
  return heading(question, on_links(question), tuning.machine.measured) + candidates(spec) + steps_of(question, spec);
}

Result<Collective> collective_named(std::string_view wanted) {
  std::string names;
  for (int number = 1; number < kCollectiveCount; ++number) {
    const auto collective = static_cast<Collective>(number);
    if (wanted == name(collective)) return collective;
    names += (names.empty() ? "" : ", ") + std::string(name(collective));
  }
  return fail(ErrorCode::kInvalidArgument, fmt::format("'{}' is not a collective: choose from {}", wanted, names));
}

}  // namespace muster
