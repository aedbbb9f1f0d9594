#pragma once

#include <string>
#include <vector>

#include "muster/launch/options/option_table.h"
#include "muster/launch/options/options.h"

namespace muster {

/// A command line taken apart: the options' text, and what follows them.
struct OptionWords {
  RawOptions raw;
  std::vector<std::string> canonical_args;  ///< the options that were there or in a PET_* variable, each "--name=value"
  std::vector<std::string> rest;
  std::string cluster;  ///< what was taken from a cluster's environment, for the user; empty: nothing
};

/// Options take dashes or underscores, `--x=y` or `--x y`, and end at the first word that is not one. torchrun's PET_*
/// variables, and then what a cluster says, stand for options that are not given. kInvalidArgument names an unknown
/// option, and the one that was probably meant.
Result<OptionWords> read_option_words(const std::vector<std::string>& words, const Environment& environment);

}  // namespace muster
