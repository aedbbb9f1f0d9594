#include "muster/steps/step_stragglers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "muster/steps/step_units.h"

namespace muster {
namespace {

using Part = float StepTimes::*;
constexpr Part kParts[] = {&StepTimes::between_steps, &StepTimes::forward, &StepTimes::backward};
constexpr const char* kPartNames[] = {"time between steps (data, optimizer)", "forward", "backward"};
constexpr float kMinCost = 0.01F;

std::string milliseconds_of(float seconds) { return milliseconds(Duration(static_cast<int64_t>(seconds * 1e9F))); }

float mean(const std::vector<StepTimes>& steps, Part part) {
  double sum = 0;
  for (const StepTimes& step : steps) sum += step.*part;
  return static_cast<float>(sum / static_cast<double>(steps.size()));
}

/// The lower one of two middle values.
float median(std::vector<float> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() - 1) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void compare_part(const std::vector<std::vector<StepTimes>>& steps, Part part, StragglerReport& report) {
  std::vector<float> means;
  for (const auto& stats : steps) means.push_back(mean(stats, part));
  for (size_t rank = 0; rank < means.size(); ++rank) report.ranks[rank].excess.*part = means[rank] - median(means);
  report.step += median(means);
}

}  // namespace

Rank StragglerReport::slowest_rank() const {
  if (steps == 0 || ranks.size() < 2) return kNoRank;
  const auto more = [](const RankStats& a, const RankStats& b) { return a.last < b.last; };
  return static_cast<Rank>(std::max_element(ranks.begin(), ranks.end(), more) - ranks.begin());
}

bool StragglerReport::is_significant() const {
  const Rank rank = slowest_rank();
  if (rank == kNoRank) return false;
  const RankStats& late = ranks[rank];
  const float share = static_cast<float>(late.last) / static_cast<float>(steps);
  return share >= std::min(0.75F, 2.0F / static_cast<float>(ranks.size())) && share * late.lag >= kMinCost * step;
}

std::string StragglerReport::to_string() const {
  const Rank rank = slowest_rank();
  if (rank == kNoRank)
    return ranks.size() == 1 ? "there is a single rank: no rank waits" : "no step has been reduced yet";
  const RankStats& late = ranks[rank];
  std::string text = fmt::format("rank {} was last in {:.0f} % of {} steps, by {} on average", rank,
                                 100.0 * static_cast<double>(late.last) / static_cast<double>(steps), steps,
                                 milliseconds_of(late.lag));
  if (!is_significant()) return "no rank is significantly slower: " + text;
  size_t worst = 0;
  for (size_t part = 1; part < std::size(kParts); ++part) {
    if (late.excess.*kParts[part] > late.excess.*kParts[worst]) worst = part;
  }
  if (late.excess.*kParts[worst] < late.lag / 4) return text;
  return text + fmt::format("; its {} takes {} longer than the others'", kPartNames[worst],
                            milliseconds_of(late.excess.*kParts[worst]));
}

StragglerReport compare(const std::vector<std::vector<StepTimes>>& steps) {
  StragglerReport report;
  report.ranks.resize(steps.size());
  report.steps = steps.empty() ? 0 : steps[0].size();
  if (report.steps == 0) return report;
  for (Part part : kParts) compare_part(steps, part, report);
  if (steps.size() < 2) return report;
  for (size_t number = 0; number < report.steps; ++number) {
    std::vector<std::pair<float, size_t>> waits;
    for (size_t rank = 0; rank < steps.size(); ++rank) waits.emplace_back(steps[rank][number].waiting, rank);
    std::partial_sort(waits.begin(), waits.begin() + 2, waits.end());
    StragglerReport::RankStats& late = report.ranks[waits[0].second];
    ++late.last;
    late.lag += waits[1].first - waits[0].first;
  }
  for (StragglerReport::RankStats& stats : report.ranks) {
    if (stats.last > 0) stats.lag /= static_cast<float>(stats.last);
  }
  return report;
}

Result<StragglerReport> find_stragglers(Group& group, const StepHistory& history, uint64_t steps) {
  const size_t size = group.membership().size;
  const size_t rows = 1 + std::clamp<uint64_t>(steps, 1, StepHistory::kSteps);
  // One row for the number of steps, then the steps, oldest first.
  std::vector<StepTimes> own(rows), all(rows * size);
  const uint64_t count = history.count();
  std::memcpy(static_cast<void*>(own.data()), &count, sizeof count);
  const uint64_t first = std::max(history.first(), count + 2 - std::min<uint64_t>(rows, count + 1));
  for (uint64_t number = first; number <= count; ++number) own[1 + number - first] = history.step(number);
  const auto bytes = [](std::vector<StepTimes>& rows) {
    return BufferView(rows.data(), rows.size() * sizeof(StepTimes), Dtype::kUint8);
  };
  if (auto gathered = group.all_gather(bytes(own), bytes(all)).wait(); !gathered)
    return tl::unexpected(gathered.error());

  std::vector<std::vector<StepTimes>> by_rank;
  for (size_t rank = 0; rank < size; ++rank) {
    const StepTimes* stats = &all[rank * rows];
    uint64_t others;
    std::memcpy(&others, stats, sizeof others);
    if (others != count) {
      return fail(
          ErrorCode::kMismatch,
          fmt::format(
              "rank {} has reduced {} steps and this rank {}: ask for the report at all ranks after the same step",
              rank, others, count),
          static_cast<Rank>(rank));
    }
    by_rank.emplace_back(stats + 1, stats + 2 + count - first);
  }
  return compare(by_rank);
}

}  // namespace muster
