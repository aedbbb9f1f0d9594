#include "muster/launch/options/command_line.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <numeric>

#include "muster/launch/failure.h"

namespace muster {
namespace {

// The Levenshtein distance: how many letters to insert, delete or replace. Computed row by row.
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

// CLI11 says "Could not convert: --last = ten". Every text is valid, so the option takes a number.
std::string describe(const CLI::ConversionError& error) {
  const std::string text = error.what(), before = "Could not convert: ";
  const size_t equals = text.find(" = ");
  if (!text.starts_with(before) || equals == std::string::npos) return text;
  const std::string name = text.substr(before.size(), equals - before.size());
  return fmt::format("'{}' is not a number that {} takes", text.substr(equals + 3), name);
}

// Describes too many arguments. If the app has commands and none was given, the argument is probably meant to be one.
std::string describe(const CLI::ExtrasError& error, const CLI::App& app) {
  const auto left = app.remaining(true);
  const auto commands = app.get_subcommands(nullptr);
  if (commands.empty() || !app.get_subcommands().empty() || left.empty() || left.front().starts_with('-')) {
    return error.what();
  }
  std::vector<std::string> names;
  for (const auto* command : commands) names.push_back(command->get_name());
  const std::string nearest = nearest_word(left.front(), names);
  return fmt::format("unknown command '{}'{}{}", left.front(), nearest.empty() ? "" : "; did you mean ", nearest);
}

int refuse(const CLI::App& app, const std::string& reason) {
  const std::string name = app.get_name().substr(app.get_name().rfind(' ') + 1);
  return print_error(name.c_str(), fmt::format("{} (see `{} --help`)", reason, app.get_name()), 2);
}

}  // namespace

std::optional<int> parse_command_line(CLI::App& app, const std::vector<std::string>& args) {
  try {
    app.parse(std::vector<std::string>(args.rbegin(), args.rend()));  // the order that CLI11 expects
    return std::nullopt;
  } catch (const CLI::CallForHelp&) {
    return std::fputs(app.help().c_str(), stdout) < 0 ? 1 : 0;
  } catch (const CLI::ConversionError& error) {
    return refuse(app, describe(error));
  } catch (const CLI::ExtrasError& error) {
    return refuse(app, describe(error, app));
  } catch (const CLI::ParseError& error) {
    return refuse(app, error.what());
  }
}

std::function<std::string(const std::string&)> number_between(double least, double most, const std::string& what) {
  return [=](const std::string& word) -> std::string {
    double value = 0;
    const bool number = CLI::detail::lexical_cast(word, value);
    if (number && value >= least && value <= most) return "";
    return fmt::format("'{}' is not {}", word, what);
  };
}

std::string nearest_word(const std::string& word, const std::vector<std::string>& known) {
  constexpr size_t kFar = 3;  // letters; a larger distance means another word
  std::string nearest;
  size_t least = std::min(kFar + 1, word.size() / 2 + word.size() % 2);
  for (const auto& other : known) {
    const size_t letters = distance(word, other);
    if (letters < least) least = letters, nearest = other;
  }
  return nearest;
}

}  // namespace muster
