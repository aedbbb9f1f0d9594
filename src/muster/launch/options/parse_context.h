#pragma once

#include <string>

#include "muster/launch/options/option_table.h"
#include "muster/launch/options/options.h"

namespace muster {

/// What a parse of the options reads from, and what it fills in.
struct Reading {
  const RawOptions& raw;
  const Environment& environment;
  const Machine& machine;
  RunOptions options;

  /// Empty when it is not set.
  std::string variable(const char* name) const {
    const auto found = environment.find(name);
    return found == environment.end() ? "" : found->second;
  }
};

/// Where the nodes meet; after --nnodes and --hosts are read.
Result<> read_meeting(Reading& reading);
/// --rdzv-conf, in two steps: what decides about the backend, before that and its URL are read, and the rest, after.
Result<> choose_file_store(Reading& reading);
Result<> read_rdzv_conf(Reading& reading);

}  // namespace muster
