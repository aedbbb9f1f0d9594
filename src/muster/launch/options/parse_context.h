#pragma once

#include <string>
#include <vector>

#include "muster/launch/options/option_table.h"
#include "muster/launch/options/options.h"

namespace muster {

/// A parsed command line: the values of the options as text, and the arguments after them.
struct ParsedArgs {
  RawOptions raw;
  std::vector<std::string> canonical_args;  ///< the options from the command line and from PET_*, each "--name=value"
  std::vector<std::string> rest;
  std::string cluster;  ///< for the user: the options that a cluster's environment gave; empty: none
};

/// Options have dashes or underscores, and a value as `--x=y` or `--x y`. They end at the first argument that is not an
/// option. If an option is not given, its value comes from torchrun's PET_* variables, or else from the cluster's
/// environment. kInvalidArgument for an unknown option; the message names it and the most similar known option.
Result<ParsedArgs> parse_args(const std::vector<std::string>& args, const Environment& environment);

/// The inputs and the result of a parser of the options.
struct ParseContext {
  const RawOptions& raw;
  const Environment& environment;
  const Machine& machine;
  RunOptions options;

  /// Empty if the variable is not set.
  std::string variable(const char* name) const {
    const auto found = environment.find(name);
    return found == environment.end() ? "" : found->second;
  }
};

/// Parses the options of the rendezvous. Call it after --nnodes and --hosts were parsed.
Result<> read_rendezvous(ParseContext& context);
/// Parse --rdzv-conf in two steps: first the keys that decide on the backend, then, when the backend's URL is known,
/// the other keys.
Result<> choose_file_store(ParseContext& context);
Result<> read_rdzv_conf(ParseContext& context);

}  // namespace muster
