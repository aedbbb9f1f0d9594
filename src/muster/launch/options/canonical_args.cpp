#include "muster/launch/options/canonical_args.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iterator>
#include <optional>
#include <set>

#include "muster/launch/options/cluster.h"
#include "muster/launch/options/command_line.h"
#include "muster/launch/options/option_values.h"

namespace muster {
namespace {

std::unique_ptr<CLI::App> make_app(RawOptions& raw) {
  auto app = std::make_unique<CLI::App>(
      "Starts the workers of a distributed job on this node: one process per rank, with torchrun's environment.\n"
      "Options end at the script; what follows belongs to it.",
      "muster run");
  app->set_help_flag();
  for (const auto& row : option_table()) {
    CLI::Option* option = nullptr;
    if (row.flag != nullptr) {
      option = app->add_flag(row.names, raw.*row.flag, row.description);
    } else {
      option = app->add_option(row.names, raw.*row.text, row.description)->type_name(row.takes)->take_last();
      if (!(raw.*row.text).empty()) option->default_str(raw.*row.text);
    }
    option->group(row.group);
  }
  return app;
}

const OptionRow* find_row(const std::string& name) {
  for (const auto& row : option_table()) {
    const std::string names = fmt::format(",{},", row.names);
    if (names.find("," + name + ",") != std::string::npos) return &row;
  }
  return nullptr;
}

tl::unexpected<Error> unknown_option(const std::string& name) {
  std::vector<std::string> names, beginnings;
  for (const auto& row : option_table()) names.push_back(row.name());
  std::copy_if(names.begin(), names.end(), std::back_inserter(beginnings),
               [&](const std::string& known) { return name.size() > 4 && known.starts_with(name); });
  std::string meant = beginnings.empty() ? nearest_word(name, names) : fmt::format("{}", fmt::join(beginnings, " or "));
  if (name == "-n" || name == "-np") meant = "--nproc-per-node";  // as mpirun calls it
  return bad_option(fmt::format("unknown option {}{}{}", name, meant.empty() ? "" : "; did you mean ", meant));
}

// A word of the command line: the option it names, and its value where that is part of it.
struct Word {
  std::string name;
  std::optional<std::string> value;
};

// "--nproc_per_node=4" and "-r3" taken apart.
Word take_apart(const std::string& word) {
  if (!word.starts_with("--")) {
    if (word.size() == 2) return {word, std::nullopt};
    return {word.substr(0, 2), word.substr(word[2] == '=' ? 3 : 2)};
  }
  const size_t equals = word.find('=');
  std::string name = word.substr(0, equals);
  std::replace(name.begin(), name.end(), '_', '-');
  if (equals == std::string::npos) return {name, std::nullopt};
  return {name, word.substr(equals + 1)};
}

// "--name=value" as CLI11 reads it: one spelling for each option and each truth value.
Result<std::string> spell(const OptionRow& row, const std::string& name, const std::optional<std::string>& value) {
  if (row.flag == nullptr) {
    if (value && !value->empty()) return row.name() + "=" + *value;
    return bad_option(fmt::format("{} takes {}, and nothing was given", name, row.takes));
  }
  const auto truth = value ? to_bool(*value) : true;
  if (truth) return row.name() + (*truth ? "=true" : "=false");
  return bad_option(fmt::format("{} takes no value, or true or false, not '{}'", name, *value));
}

struct Split {
  std::vector<std::string> options, rest;
  std::set<std::string> given;
};

// Cuts the words where the options end.
Result<Split> split_words(const std::vector<std::string>& words) {
  Split split;
  size_t i = 0;
  for (; i < words.size() && words[i].size() > 1 && words[i][0] == '-'; ++i) {
    if (words[i] == "--") {
      ++i;
      break;
    }
    auto [name, value] = take_apart(words[i]);
    const auto* row = find_row(name);
    if (row == nullptr) return unknown_option(words[i].starts_with("--") ? name : words[i]);
    const bool has_next = i + 1 < words.size();
    const bool next_is_truth = has_next && (words[i + 1] == "true" || words[i + 1] == "false");
    if (!value && (row->flag == nullptr ? has_next : next_is_truth)) value = words[++i];
    MUSTER_ASSIGN(const std::string arg, spell(*row, name, value));
    split.options.push_back(arg);
    split.given.insert(row->name());
  }
  split.rest.assign(words.begin() + static_cast<std::ptrdiff_t>(i), words.end());
  return split;
}

std::string variable_of(const OptionRow& row) {
  std::string variable = "PET_" + row.name().substr(2);
  std::transform(variable.begin(), variable.end(), variable.begin(),
                 [](unsigned char c) { return c == '-' ? '_' : static_cast<char>(std::toupper(c)); });
  return variable;
}

// torchrun reads PET_NNODES and so on; a cluster's operator may set them.
Result<> add_environment(const Environment& environment, Split& split) {
  const std::set<std::string> given = split.given;
  const auto has = [&](const char* name) { return given.count(name) != 0; };
  for (const auto& row : option_table()) {
    const std::string name = row.name();
    const auto found = environment.find(variable_of(row));
    if (found == environment.end() || found->second.empty() || has(name.c_str())) continue;
    // They name one thing: an operator's word for it yields to the user's, whichever the user chose.
    if (name == "--rdzv-endpoint" && has("--master-addr")) continue;
    if ((name == "--master-addr" || name == "--master-port") && has("--rdzv-endpoint")) continue;
    MUSTER_ASSIGN(const std::string arg, spell(row, found->first, found->second));
    split.options.push_back(arg);
    split.given.insert(name);
  }
  return {};
}

// The number of nodes is the user's to say; where it is another than the cluster's, this is another job than its.
bool is_clusters_job(const Split& split, const Cluster& cluster) {
  if (cluster.nnodes == 0 || split.given.count("--nnodes") == 0) return true;
  std::string nnodes;
  for (const auto& option : split.options)
    if (option.starts_with("--nnodes=")) nnodes = option.substr(option.find('=') + 1);
  return nnodes.substr(nnodes.find(':') + 1) == std::to_string(cluster.nnodes);  // npos + 1 is 0: all of it
}

Result<std::string> add_cluster(const Environment& environment, Split& split) {
  const auto given = [&](const char* name) { return split.given.count(name) != 0; };
  for (const char* name : {"--standalone", "--hosts", "--hostfile", "--help"})
    if (given(name)) return "";
  if (given("--nnodes") && given("--node-rank")) return "";
  MUSTER_ASSIGN(const auto cluster, find_cluster(environment));
  if (!cluster || !is_clusters_job(split, *cluster)) return "";
  if (cluster->nnodes == 0 && !given("--nnodes"))
    return bad_option(cluster->name +
                      " does not say how many nodes the job has: give --nnodes (1, or --standalone, for "
                      "a job on this node alone)");
  std::string taken;
  for (const auto& option : cluster->options()) {
    const std::string name = option.substr(0, option.find('='));
    if (given(name.c_str()) || (name.starts_with("--master") && given("--rdzv-endpoint"))) continue;
    split.options.push_back(option);
    taken += " " + option;
  }
  return taken.empty() ? "" : cluster->name + ":" + taken;
}

}  // namespace

Result<OptionWords> read_option_words(const std::vector<std::string>& words, const Environment& environment) {
  OptionWords result;
  const auto app = make_app(result.raw);
  MUSTER_ASSIGN(Split split, split_words(words));
  MUSTER_TRY(add_environment(environment, split));
  result.canonical_args = split.options;
  MUSTER_ASSIGN(result.cluster, add_cluster(environment, split));
  std::reverse(split.options.begin(), split.options.end());  // as CLI11 wants them
  // CLI11 reports by exception; nothing in the core does.
  try {
    app->parse(split.options);
  } catch (const CLI::Error& error) {
    return bad_option(error.what());
  }
  result.rest = std::move(split.rest);
  return result;
}

std::string run_help() {
  RawOptions raw;
  auto app = make_app(raw);
  app->get_formatter()->column_width(46);
  app->footer(
      "Switches also take =true and =false, options also PET_<NAME> in the environment, as torchrun's do. Workers get\n"
      "torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, ...). Unless it is set,\n"
      "OMP_NUM_THREADS is this node's CPUs divided by its workers. MUSTER_PYTHON names another Python for the "
      "workers.");
  std::string help = app->help();
  constexpr std::string_view kUsage = "[OPTIONS]";
  if (const size_t at = help.find(kUsage); at != std::string::npos)
    help.replace(at, kUsage.size(), "[options] script.py [arguments of the script]");
  return help;
}

}  // namespace muster
