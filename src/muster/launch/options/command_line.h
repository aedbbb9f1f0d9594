#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace muster {

/// Reads the words of one of muster's commands, whose app is named as it is called: "muster dump". Nothing to go on;
/// else the status to end with: 0 after the help was printed, 2 after a complaint.
std::optional<int> parse_command_line(CLI::App& app, const std::vector<std::string>& words);

/// A check of an option whose number is between the two, and is called `what` where it is not.
std::function<std::string(const std::string&)> number_between(double least, double most, const std::string& what);

/// The one of `known` that `word` is probably meant to be: that fewest letters make of it. Empty if all are other
/// words.
std::string nearest_word(const std::string& word, const std::vector<std::string>& known);

}  // namespace muster
