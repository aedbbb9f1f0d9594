#include "muster/launch/command_line.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <numeric>

#include "muster/launch/failure.h"

namespace muster {
namespace {

// How many letters to add, drop or replace to make one word of the other (Levenshtein's distance, row by row).
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0U);
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

}  // namespace

std::optional<int> parse_command_line(CLI::App& app, const std::vector<std::string>& words) {
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // CLI11 takes them from the back
    return std::nullopt;
  } catch (const CLI::CallForHelp&) {
    return std::fputs(app.help().c_str(), stdout) < 0 ? 1 : 0;
  } catch (const CLI::ParseError& error) {
    const std::string name = app.get_name().substr(app.get_name().rfind(' ') + 1);
    return complain(name.c_str(), fmt::format("{} (`{} --help` says what there is)", error.what(), app.get_name()), 2);
  }
}

std::string nearest_word(const std::string& word, const std::vector<std::string>& known) {
  constexpr size_t kFar = 3;  // letters: further apart is another word
  std::string nearest;
  size_t least = std::min(kFar + 1, word.size() / 2 + word.size() % 2);
  for (const auto& other : known) {
    const size_t apart = distance(word, other);
    if (apart < least) least = apart, nearest = other;
  }
  return nearest;
}

}  // namespace muster
