#include "muster/cli/completion.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <sstream>

#include "muster/launch/options/option_table.h"

namespace muster {
namespace {

// All scripts get the same answer. Only the bash script drops the descriptions, because bash does not show them.
constexpr const char* kBash = R"sh(_muster() {{
  local line
  COMPREPLY=()
  while IFS= read -r line; do
    COMPREPLY+=("${{line%%$'\t'*}}")
  done < <('{0}' completion words "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null)
}}
complete -o default -F _muster muster
)sh";
constexpr const char* kZsh = R"sh(#compdef muster
_muster() {{
  local -a found
  found=(${{(f)"$('{0}' completion words "${{(@)words[2,CURRENT]}}" 2>/dev/null)"}})
  found=(${{found//$'\t'/:}})
  if (( ${{#found}} )); then
    _describe -V muster found
  else
    _files
  fi
}}
compdef _muster muster
)sh";
constexpr const char* kFish = R"sh(function __muster_words
  set -l words (commandline -opc)
  '{0}' completion words $words[2..-1] (commandline -ct) 2>/dev/null
end
complete -c muster -n __fish_use_subcommand -f
complete -c muster -a '(__muster_words)'
)sh";

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> words;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, separator);) words.push_back(word);
  return words;
}

// Collects the words that begin with the typed text.
class Answer {
 public:
  explicit Answer(std::string typed) : typed_(std::move(typed)) {}
  void offer(const std::string& word, const std::string& description = "") {
    if (word.starts_with(typed_)) text_ += word + '\t' + description + '\n';
  }
  void offer(const std::vector<CommandSyntax>& commands) {
    for (const auto& command : commands) offer(command.name, command.summary);
  }
  bool is_option() const { return typed_.starts_with('-'); }
  const std::string& text() const { return text_; }

 private:
  const std::string typed_;
  std::string text_;
};

const CommandSyntax* find(const std::vector<CommandSyntax>& commands, const std::string& name) {
  const auto found =
      std::find_if(commands.begin(), commands.end(), [&](const auto& command) { return command.name == name; });
  return found == commands.end() ? nullptr : &*found;
}

// An option of `muster run`, or the value of the option before it.
void offer_run(const std::string& previous, Answer& answer) {
  for (const auto& row : option_table()) {
    if (*row.group == '\0') continue;
    const auto names = split(row.names, ',');
    if (row.takes != nullptr && std::find(names.begin(), names.end(), previous) != names.end()) {
      // Only literal values are offered; they are in lower case.
      for (const auto& word : split(row.takes, '|'))
        if (std::none_of(word.begin(), word.end(), [](unsigned char c) { return std::isupper(c); })) answer.offer(word);
      return;
    }
  }
  for (const auto& row : option_table())
    if (*row.group != '\0' && answer.is_option())
      for (const auto& name : split(row.names, ',')) answer.offer(name, row.description);
}

}  // namespace

Result<std::string> completion_script(const std::string& shell, const std::string& program) {
  if (shell == "bash") return fmt::format(kBash, program);
  if (shell == "zsh") return fmt::format(kZsh, program);
  if (shell == "fish") return fmt::format(kFish, program);
  return fail(ErrorCode::kInvalidArgument, "muster completion takes bash, zsh or fish, not '" + shell + "'");
}

std::string completions(const std::vector<std::string>& words, const std::vector<CommandSyntax>& commands) {
  Answer answer(words.empty() ? "" : words.back());
  const CommandSyntax* command = words.size() < 2 ? nullptr : find(commands, words.front());
  if (words.size() < 2) {
    answer.offer(commands);
  } else if (words.front() == "run") {
    offer_run(words[words.size() - 2], answer);
  } else if (command != nullptr) {
    const CommandSyntax* sub = nullptr;
    for (size_t i = 1; i + 1 < words.size() && sub == nullptr; ++i) sub = find(command->subcommands, words[i]);
    if (sub == nullptr && !answer.is_option()) answer.offer(command->subcommands);
    if (sub != nullptr && answer.is_option())
      for (const auto& option : sub->options) answer.offer(option);
  }
  return answer.text();
}

}  // namespace muster
