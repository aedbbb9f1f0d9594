#include "muster/launch/options/parse_context.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
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
      "The arguments after the script are passed to it.",
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
  std::vector<std::string> names, prefixes;
  for (const auto& row : option_table()) {
    names.push_back(row.name());
    if (name.size() > 4 && names.back().starts_with(name)) prefixes.push_back(names.back());
  }
  std::string meant = prefixes.empty() ? nearest_word(name, names) : fmt::format("{}", fmt::join(prefixes, " or "));
  if (name == "-n" || name == "-np") meant = "--nproc-per-node";  // mpirun's name of this option
  return bad_option(fmt::format("unknown option {}{}{}", name, meant.empty() ? "" : "; did you mean ", meant));
}

// Splits "--nproc_per_node=4" and "-r3" into the option's name and its value, if that is part of the argument.
std::pair<std::string, std::optional<std::string>> split_arg(const std::string& arg) {
  if (!arg.starts_with("--")) {
    if (arg.size() == 2) return {arg, std::nullopt};
    return {arg.substr(0, 2), arg.substr(arg[2] == '=' ? 3 : 2)};
  }
  const size_t equals = arg.find('=');
  std::string name = arg.substr(0, equals);
  std::replace(name.begin(), name.end(), '_', '-');
  if (equals == std::string::npos) return {name, std::nullopt};
  return {name, arg.substr(equals + 1)};
}

// Returns "--name=value", with one spelling for each option and each boolean.
Result<std::string> canonical_arg(const OptionRow& row, const std::string& name,
                                  const std::optional<std::string>& value) {
  if (row.flag == nullptr) {
    if (value && !value->empty()) return row.name() + "=" + *value;
    return bad_option(fmt::format("{} takes {}, but no value was given", name, row.takes));
  }
  const auto truth = value ? to_bool(*value) : true;
  if (truth) return row.name() + (*truth ? "=true" : "=false");
  return bad_option(fmt::format("{} takes no value, true or false, not '{}'", name, *value));
}

struct Split {
  std::vector<std::string> options, rest;
  std::set<std::string> given;

  bool has(const std::string& name) const { return given.contains(name); }
};

// Splits the arguments into options and the rest.
Result<Split> split_args(const std::vector<std::string>& args) {
  Split split;
  size_t i = 0;
  for (; i < args.size() && args[i].size() > 1 && args[i][0] == '-'; ++i) {
    if (args[i] == "--") {
      ++i;
      break;
    }
    auto [name, value] = split_arg(args[i]);
    const auto* row = find_row(name);
    if (row == nullptr) return unknown_option(args[i].starts_with("--") ? name : args[i]);
    const bool has_next = i + 1 < args.size();
    const bool next_is_truth = has_next && (args[i + 1] == "true" || args[i + 1] == "false");
    if (!value && (row->flag == nullptr ? has_next : next_is_truth)) value = args[++i];
    MUSTER_ASSIGN(const std::string arg, canonical_arg(*row, name, value));
    split.options.push_back(arg);
    split.given.insert(row->name());
  }
  split.rest.assign(args.begin() + static_cast<std::ptrdiff_t>(i), args.end());
  return split;
}

std::string variable_of(const OptionRow& row) {
  std::string variable = "PET_" + row.name().substr(2);
  std::transform(variable.begin(), variable.end(), variable.begin(),
                 [](unsigned char c) { return c == '-' ? '_' : static_cast<char>(std::toupper(c)); });
  return variable;
}

// Adds options from torchrun's variables PET_NNODES and so on, which a cluster's operator may set.
Result<> add_environment(const Environment& environment, Split& split) {
  const Split user = split;
  for (const auto& row : option_table()) {
    const std::string name = row.name(), variable = variable_of(row), value = value_of(environment, variable);
    if (value.empty() || user.has(name)) continue;
    // These options have the same meaning. The user's option has priority over the operator's.
    if (name == "--rdzv-endpoint" && user.has("--master-addr")) continue;
    if ((name == "--master-addr" || name == "--master-port") && user.has("--rdzv-endpoint")) continue;
    MUSTER_ASSIGN(const std::string arg, canonical_arg(row, variable, value));
    split.options.push_back(arg);
    split.given.insert(name);
  }
  return {};
}

// False if the user asks for a number of nodes that the cluster does not have: this is a different job.
bool is_clusters_job(const Split& split, const Cluster& cluster) {
  if (cluster.nnodes == 0 || !split.has("--nnodes")) return true;
  std::string nnodes;
  for (const auto& option : split.options)
    if (option.starts_with("--nnodes=")) nnodes = option.substr(option.find('=') + 1);
  return nnodes.substr(nnodes.find(':') + 1) == std::to_string(cluster.nnodes);  // npos + 1 is 0: the whole text
}

Result<std::string> add_cluster(const Environment& environment, Split& split) {
  for (const char* name : {"--standalone", "--hosts", "--hostfile", "--help"})
    if (split.has(name)) return "";
  if (split.has("--nnodes") && split.has("--node-rank")) return "";
  MUSTER_ASSIGN(const auto cluster, find_cluster(environment));
  if (!cluster || !is_clusters_job(split, *cluster)) return "";
  if (cluster->nnodes == 0 && !split.has("--nnodes"))
    return bad_option(cluster->name +
                      " does not say how many nodes the job has: give --nnodes (1 or --standalone for "
                      "a job of one node)");
  std::string taken;
  for (const auto& option : cluster->options()) {
    const std::string name = option.substr(0, option.find('='));
    if (split.has(name) || (name.starts_with("--master") && split.has("--rdzv-endpoint"))) continue;
    split.options.push_back(option);
    taken += " " + option;
  }
  return taken.empty() ? "" : cluster->name + ":" + taken;
}

}  // namespace

Result<> parse_args(const std::vector<std::string>& args, ParseContext& context) {
  const auto app = make_app(context.raw);
  MUSTER_ASSIGN(Split split, split_args(args));
  MUSTER_TRY(add_environment(context.environment, split));
  context.options.canonical_args = split.options;
  MUSTER_ASSIGN(context.options.cluster, add_cluster(context.environment, split));
  std::reverse(split.options.begin(), split.options.end());  // the order that CLI11 expects
  // CLI11 reports errors by exceptions; the core does not use them.
  try {
    app->parse(split.options);
  } catch (const CLI::Error& error) {
    return bad_option(error.what());
  }
  context.rest = std::move(split.rest);
  return {};
}

std::string run_help() {
  RawOptions raw;
  auto app = make_app(raw);
  app->get_formatter()->column_width(46);
  app->footer(
      "Switches also take =true and =false. Each option can be set by PET_<NAME> in the environment, as with "
      "torchrun.\n"
      "Workers get torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, ...).\n"
      "OMP_NUM_THREADS defaults to the CPUs of this node divided by its workers.\n"
      "MUSTER_PYTHON names another Python for the workers.\n"
      "SIGUSR1 and SIGUSR2 are passed to the workers. SIGHUP is passed to them, too, and ends the job. A worker that "
      "does not handle the signal dies of it. For other signals that end the job, workers get SIGTERM.");
  std::string help = app->help();
  constexpr std::string_view kUsage = "[OPTIONS]";
  if (const size_t at = help.find(kUsage); at != std::string::npos)
    help.replace(at, kUsage.size(), "[options] script.py [arguments of the script]");
  return help;
}

}  // namespace muster
