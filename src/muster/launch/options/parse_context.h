#pragma once

#include <string>
#include <vector>

#include "muster/launch/options/option_table.h"
#include "muster/launch/options/options.h"

namespace muster {

/// The inputs and the result of a parser of the options.
struct ParseContext {
  const Environment& environment;
  const Machine& machine;
  RawOptions raw;                 ///< the values of the options as text
  std::vector<std::string> rest;  ///< the arguments after the options
  RunOptions options;

  /// Empty if the variable is not set.
  std::string variable(const char* name) const { return value_of(environment, name); }
};

/// Sets the raw options, the rest, and in the options the canonical arguments and the cluster. Options have dashes or
/// underscores, and a value as `--x=y` or `--x y`. They end at the first argument that is not an option. If an option
/// is not given, its value comes from torchrun's PET_* variables, or else from the cluster's environment.
/// kInvalidArgument for an unknown option; the message names it and the most similar known option.
Result<> parse_args(const std::vector<std::string>& args, ParseContext& context);

/// True if with this --rdzv-backend the nodes meet in the job's own store.
bool is_own_store(const std::string& backend);
/// Parses the options of the rendezvous. Call it after --nnodes and --hosts were parsed.
Result<> read_rendezvous(ParseContext& context);
/// Parse --rdzv-conf in two steps: first the keys that decide on the backend, then, when the backend's URL is known,
/// the other keys.
Result<> choose_file_store(ParseContext& context);
Result<> read_rdzv_conf(ParseContext& context);

}  // namespace muster
