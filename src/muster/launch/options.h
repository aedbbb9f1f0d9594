#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/clock.h"
#include "muster/base/error.h"

namespace muster {

/// A copy of the environment: what a parse depends on is passed in, so that it can be tested.
using Environment = std::map<std::string, std::string>;
Environment current_environment();

/// What the machine has, for --nproc-per-node auto, cpu and gpu.
struct Machine {
  int cpus = 1;  ///< that this process may run on
  int gpus = 0;
};
Machine this_machine();

/// What `muster run` was asked to do.
struct RunOptions {
  enum class Target { kScript, kModule, kProgram };

  bool help = false;  ///< nothing else counts then
  int nnodes = 1;
  int nproc = 1;                 ///< workers on this node
  std::optional<int> node_rank;  ///< none: by order of arrival
  std::string master_addr;       ///< empty on a single node
  uint16_t master_port = 0;      ///< 0: any free one (single node only)
  std::string local_addr;        ///< interface or address of this node to listen on; empty: master_addr's
  std::string run_id;
  std::string role = "default";
  std::string log_dir;          ///< empty: none
  Bytes secret;                 ///< the job's, from MUSTER_SECRET or --secret-file; empty: none given
  Duration timeout{};           ///< for all nodes to arrive
  Duration shutdown_timeout{};  ///< between SIGTERM and SIGKILL
  Target target = Target::kScript;
  std::string program;  ///< script, module or program
  std::vector<std::string> arguments;
};

/// Reads what follows `muster run`. Options take dashes or underscores and end at the first word that is not one: the
/// rest is the script's. torchrun's PET_* variables stand for options that are not given. kInvalidArgument names the
/// option and what it takes.
Result<RunOptions> parse_run_options(const std::vector<std::string>& arguments, const Environment& environment,
                                     const Machine& machine);
std::string run_help();

}  // namespace muster
