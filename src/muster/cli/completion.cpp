#include "muster/cli/completion.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <sstream>

#include "muster/launch/options/option_table.h"

namespace muster {
namespace {

using Words = std::vector<std::string>;

Words split(const std::string& text, char separator) {
  Words words;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, separator);) words.push_back(word);
  return words;
}

std::string spaced(const Words& words) {
  std::string all;
  for (const auto& word : words) all += (all.empty() ? "" : " ") + word;
  return all;
}

// The words that an option takes literally: those in small letters.
Words choices(const OptionRow& row) {
  Words literal;
  for (const auto& word : split(row.takes == nullptr ? "" : row.takes, '|'))
    if (std::none_of(word.begin(), word.end(), [](unsigned char c) { return std::isupper(c); }))
      literal.push_back(word);
  return literal;
}

bool takes_path(const OptionRow& row) {
  const std::string takes = row.takes == nullptr ? "" : row.takes;
  return takes.find("FILE") != std::string::npos || takes == "FOLDER";
}

Words names(const OptionRow& row) { return split(row.names, ','); }

template <class Visit>
void each_row(Visit visit) {
  for (const auto& row : option_table())
    if (*row.group != '\0') visit(row);
}

Words names(const std::vector<CommandWords>& commands) {
  Words all;
  for (const auto& command : commands) all.push_back(command.name);
  return all;
}

// For each command with subcommands: their names, then for each of those what it takes.
std::string bash_subcommands(const std::vector<CommandWords>& commands) {
  std::string cases;
  for (const auto& command : commands) {
    if (command.subcommands.empty()) continue;
    std::string offers;
    for (const auto& sub : command.subcommands)
      if (!sub.options.empty()) offers += fmt::format("      {}) words='{}' ;;\n", sub.name, spaced(sub.options));
    cases += fmt::format("    {}) subs='{}'\n", command.name, spaced(names(command.subcommands)));
    cases +=
        R"(      for word in "${COMP_WORDS[@]:2:COMP_CWORD-2}"; do
        [[ " $subs " == *" $word "* ]] && sub=$word && break
      done
      [[ $sub || $cur == -* ]] || COMPREPLY=($(compgen -W "$subs" -- "$cur"))
      case "$sub" in
)" + offers +
        R"(      esac
      [[ $cur != -* ]] || COMPREPLY=($(compgen -W "$words" -- "$cur"))
      return ;;
)";
  }
  return cases;
}

std::string bash(const std::vector<CommandWords>& commands) {
  std::string cases;
  Words all;
  each_row([&](const OptionRow& row) {
    for (const auto& name : names(row)) all.push_back(name);
    std::string pattern = row.names;
    for (size_t at = 0; (at = pattern.find(',', at)) != std::string::npos;) pattern[at] = '|';
    const std::string words = spaced(choices(row));
    const std::string files = takes_path(row) ? " -f" : "";
    if (row.takes != nullptr)
      cases += fmt::format("    {}) COMPREPLY=($(compgen{} -W '{}' -- \"$cur\")); return ;;\n", pattern, files, words);
  });
  return fmt::format(R"(_muster() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} word sub subs words
  if (( COMP_CWORD == 1 )); then
    COMPREPLY=($(compgen -W '{}' -- "$cur"))
    return
  fi
  COMPREPLY=($(compgen -f -- "$cur"))
  case "${{COMP_WORDS[1]}}" in
    run) ;;
{}    *) return ;;
  esac
  case "$prev" in
{}  esac
  [[ $cur != -* ]] || COMPREPLY=($(compgen -W '{}' -- "$cur"))
}}
complete -o filenames -F _muster muster
)",
                     spaced(names(commands)), bash_subcommands(commands), cases, spaced(all));
}

// In single quotes, and without what _arguments would read as its own.
std::string zsh_text(std::string text) {
  for (const char* special : {"'", "[", "]", ":", "`"})
    for (size_t at = 0; (at = text.find(special, at)) != std::string::npos;) text[at] = ' ';
  return text;
}

std::string zsh_subcommands(const std::vector<CommandWords>& commands) {
  std::string cases;
  for (const auto& command : commands) {
    if (command.subcommands.empty()) continue;
    std::string offers;
    for (const auto& sub : command.subcommands)
      if (!sub.options.empty()) offers += fmt::format("        {}) compadd -- {} ;;\n", sub.name, spaced(sub.options));
    cases += fmt::format(R"(    {}) subs=({})
      if [[ $words[CURRENT] == -* || -n ${{words[3,CURRENT-1]:*subs}} ]]; then
        case ${{${{words[3,-1]:*subs}}[1]}} in
{}        esac
        _files
      else
        compadd -- $subs
      fi
      return ;;
)",
                         command.name, spaced(names(command.subcommands)), offers);
  }
  return cases;
}

std::string zsh(const std::vector<CommandWords>& commands) {
  std::string specs;
  each_row([&](const OptionRow& row) {
    const std::string words = spaced(choices(row));
    std::string argument;
    if (row.takes != nullptr) argument = ":" + zsh_text(row.takes) + ":";
    if (takes_path(row)) {
      argument += "_files";
    } else if (!words.empty()) {
      argument += "(" + words + ")";
    }
    for (const auto& name : names(row)) {
      const char* equals = row.takes != nullptr && name.starts_with("--") ? "=" : "";
      specs += fmt::format("    '{}{}[{}]{}' \\\n", name, equals, zsh_text(row.description), argument);
    }
  });
  return fmt::format(R"(#compdef muster
_muster() {{
  if (( CURRENT == 2 )); then
    compadd -- {}
    return
  fi
  local -a subs
  case $words[2] in
    run) ;;
{}    *)
      _files
      return ;;
  esac
  shift words
  (( CURRENT-- ))
  _arguments -S \
{}    '*:file:_files'
}}
compdef _muster muster
)",
                     spaced(names(commands)), zsh_subcommands(commands), specs);
}

std::string fish_quote(std::string text) {
  for (size_t at = 0; (at = text.find('\'', at)) != std::string::npos; at += 2) text.insert(at, 1, '\\');
  return fmt::format("'{}'", text);
}

std::string fish_subcommands(const CommandWords& command) {
  if (command.subcommands.empty()) return "";
  const std::string all = spaced(names(command.subcommands));
  const std::string here = "__fish_seen_subcommand_from " + command.name;
  std::string lines = fmt::format("complete -c muster -n '{}; and not __fish_seen_subcommand_from {}' -f -a {}\n", here,
                                  all, fish_quote(all));
  for (const auto& sub : command.subcommands)
    for (const auto& option : sub.options)
      lines += fmt::format("complete -c muster -n '{}; and __fish_seen_subcommand_from {}' -l {}\n", here, sub.name,
                           option.substr(2));
  return lines;
}

std::string fish(const std::vector<CommandWords>& commands) {
  std::string lines =
      fmt::format("complete -c muster -n __fish_use_subcommand -f -a {}\n", fish_quote(spaced(names(commands))));
  for (const auto& command : commands) lines += fish_subcommands(command);
  each_row([&](const OptionRow& row) {
    std::string line = "complete -c muster -n '__fish_seen_subcommand_from run'";
    for (const auto& name : names(row))
      line += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
    if (takes_path(row)) {
      line += " -r";
    } else if (row.takes != nullptr) {
      line += " -x -a " + fish_quote(spaced(choices(row)));
    }
    lines += line + " -d " + fish_quote(row.description) + "\n";
  });
  return lines;
}

}  // namespace

Result<std::string> completion_script(const std::string& shell, const std::vector<CommandWords>& commands) {
  if (shell == "bash") return bash(commands);
  if (shell == "zsh") return zsh(commands);
  if (shell == "fish") return fish(commands);
  return fail(ErrorCode::kInvalidArgument, "muster completion takes bash, zsh or fish, not '" + shell + "'");
}

}  // namespace muster
