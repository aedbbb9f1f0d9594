#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace muster {

/// Parses the arguments of one of muster's commands. The app's name is the name of the command: "muster dump". Returns
/// an exit status if the command must end: 0 after it printed the help, 2 after it printed an error.
std::optional<int> parse_command_line(CLI::App& app, const std::vector<std::string>& args);

/// A check that a number is in a range. The error says that the value is not `what`.
std::function<std::string(const std::string&)> number_between(double least, double most, const std::string& what);

/// The word of `known` that is most similar to `word`; empty if none is similar.
std::string nearest_word(const std::string& word, const std::vector<std::string>& known);

}  // namespace muster
