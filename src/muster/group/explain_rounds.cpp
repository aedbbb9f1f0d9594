#include <fmt/format.h>

#include <algorithm>

#include "muster/collective/cost/cost.h"
#include "muster/collective/schedule/rounds.h"
#include "muster/group/explain.h"

namespace muster {
namespace {

constexpr int kMaxShownRanks = 16;

using Row = std::vector<std::string>;

std::string text_of(const SliceValue& slice) {
  if (slice.empty()) return "-";
  std::string text;
  for (const Term& term : slice) {
    text += fmt::format("{}{}{}", text.empty() ? "" : "+", static_cast<char>('a' + term.slice), term.rank);
  }
  return text;
}

std::string text_of(const std::vector<SliceValue>& slices) {
  std::string text;
  for (const SliceValue& slice : slices) text += fmt::format("{}{}", text.empty() ? "" : " ", text_of(slice));
  return text;
}

/// Evaluates the algorithm that is chosen for the question's bytes, but on a tensor that has one element per slice.
Result<Rounds> rounds_of(const Question& question, const Tuning& tuning, std::string& title) {
  if (question.ranks > kMaxShownRanks) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("tables and pictures are for 1 to {} ranks, got {}", kMaxShownRanks, question.ranks));
  }
  MUSTER_ASSIGN(CollectiveSpec spec, spec_over_links(question, tuning));
  const Algorithm* algorithm = choose(spec);
  if (question.collective != Collective::kBarrier) {
    spec.count = is_in_blocks(question.collective) ? 1 : static_cast<size_t>(question.ranks);
    spec.chunk_bytes = spec.element_bytes;
  }
  std::vector<Schedule> schedules;
  for (spec.rank = 0; spec.rank < spec.size; ++spec.rank) schedules.push_back(algorithm->schedule(spec));
  title = fmt::format("{} by {} on {} ranks", name(question.collective), algorithm->name, question.ranks);
  return play_rounds(spec, schedules);
}

/// The slices that a rank holds. Brackets mark the slices that changed in this round.
std::string held_text(const std::vector<SliceValue>& held, const std::vector<SliceValue>* before) {
  std::string text;
  for (size_t slice = 0; slice < held.size(); ++slice) {
    const bool changed = before == nullptr ? !held[slice].empty() : held[slice] != (*before)[slice];
    const std::string shown = text_of(held[slice]);
    text += fmt::format("{}{}{}{}", text.empty() ? "" : " ", changed ? "[" : "", shown, changed ? "]" : "");
  }
  return text;
}

std::string as_table(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const Row& row : rows) {
    for (size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], row[column].size());
    }
  }
  std::string text;
  for (size_t number = 0; number < rows.size(); ++number) {
    for (size_t column = 0; column < widths.size(); ++column) {
      text += fmt::format("| {:<{}} ", rows[number][column], widths[column]);
    }
    text += "|\n";
    if (number > 0) continue;
    for (const size_t width : widths) text += fmt::format("|{:-<{}}", "", width + 2);
    text += "|\n";
  }
  return text;
}

}  // namespace

Result<std::string> explain_table(const Question& question, const Tuning& tuning) {
  std::string title;
  MUSTER_ASSIGN(const Rounds rounds, rounds_of(question, tuning, title));
  std::vector<Row> rows(1 + rounds.held.size());
  rows[0] = {"round", "messages"};
  for (int rank = 0; rank < question.ranks; ++rank) rows[0].push_back(fmt::format("rank {}", rank));
  for (size_t round = 0; round < rounds.held.size(); ++round) {
    Row& row = rows[1 + round];
    row = {round == 0 ? "start" : std::to_string(round), ""};
    for (const auto& message : rounds.messages) {
      if (message.round != static_cast<int>(round)) continue;
      row[1] +=
          fmt::format("{}{}->{}: {}", row[1].empty() ? "" : ", ", message.from, message.to, text_of(message.slices));
    }
    for (size_t rank = 0; rank < rounds.held[round].size(); ++rank) {
      const auto& held = rounds.held[round][rank];
      const auto* before = round > 0 ? &rounds.held[round - 1][rank] : nullptr;
      // Unless the call is in place, inputs and outputs are different memory and cannot be compared.
      if (round == 1 && before->size() != held.size()) before = nullptr;
      row.push_back(round == 0 ? text_of(held) : held_text(held, before));
    }
  }
  return title + "\n\n" + as_table(rows);
}

Result<std::string> explain_picture(const Question& question, const Tuning& tuning) {
  std::string title;
  MUSTER_ASSIGN(const Rounds rounds, rounds_of(question, tuning, title));
  constexpr int kRound = 64, kTop = 34, kBox = 22, kCharacter = 7;
  size_t longest = 8;
  for (const auto& held : {rounds.held.front(), rounds.held.back()}) {
    for (const auto& slices : held) longest = std::max(longest, text_of(slices).size());
  }
  const int width = static_cast<int>(longest) * kCharacter + 16, step = width + 24;
  const int last = static_cast<int>(rounds.held.size()) - 1;
  const int bottom = kTop + kBox + last * kRound + 12;
  const auto middle = [&](int rank) { return 60 + step * rank + width / 2; };
  std::string text =
      fmt::format(R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" font-family="monospace")"
                  R"( font-size="12" fill="currentColor" text-anchor="middle"><title>{2}</title>
<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">)"
                  R"(<path d="M0,1 L7,4 L0,7 z"/></marker></defs>
)",
                  60 + step * question.ranks, bottom + kBox + 8, title);
  const auto box = [&](int rank, int y, const std::vector<SliceValue>& slices) {
    text += fmt::format(R"(<rect x="{}" y="{}" width="{}" height="{}" fill="none" stroke="currentColor"/>)"
                        "<text x=\"{}\" y=\"{}\">{}</text>\n",
                        middle(rank) - width / 2, y, width, kBox, middle(rank), y + 15, text_of(slices));
  };
  for (int rank = 0; rank < question.ranks; ++rank) {
    text += fmt::format("<text x=\"{}\" y=\"20\">rank {}</text>\n", middle(rank), rank);
    box(rank, kTop, rounds.held.front()[rank]);
    box(rank, bottom, rounds.held.back()[rank]);
  }
  for (int round = 1; round <= last; ++round) {
    text += fmt::format("<text x=\"28\" y=\"{}\">{}</text>\n", kTop + kBox + round * kRound - kRound / 2 + 6, round);
  }
  Rank sender = kNoRank;
  // Messages of this sender so far in this round. Sets the height of the label, so that labels do not overlap.
  int of_sender = 0;
  for (const auto& message : rounds.messages) {
    const int y = kTop + kBox + (message.round - 1) * kRound + 8, end = y + kRound - 10;
    of_sender = message.from == sender ? of_sender + 1 : 0;
    sender = message.from;
    const int share = 15 + 12 * (of_sender % 5);
    const int from = middle(message.from), to = middle(message.to);
    text += fmt::format(R"svg(<line x1="{}" y1="{}" x2="{}" y2="{}" stroke="currentColor" marker-end="url(#tip)"/>)svg"
                        "<text x=\"{}\" y=\"{}\">{}</text>\n",
                        from, y, to, end, from + (to - from) * share / 100, y + (end - y) * share / 100 - 4,
                        text_of(message.slices));
  }
  return text + "</svg>\n";
}

}  // namespace muster
