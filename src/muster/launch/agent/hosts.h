#pragma once

#include <string>
#include <vector>

#include "muster/launch/options/options.h"

namespace muster {

/// The command that starts the agent of `options.hosts[node]`: ssh, the host, and one word for the remote shell. It
/// contains no secrets: the job's secret and the password of --rdzv-endpoint are in host_input(), the command's
/// standard input. The node ends when this input ends. `directory`: the working directory on the host.
std::vector<std::string> host_command(const RunOptions& options, size_t node, const std::string& own_path,
                                      const std::string& directory, const Environment& environment);

std::string host_input(const RunOptions& options, const Bytes& secret);

/// `muster run --hosts`: starts an agent on each host by ssh, prints its output with the host before each line, and
/// ends all agents when one fails or a signal comes. Returns the exit status of the first agent that failed, else 0.
int run_hosts(const RunOptions& options, const std::string& own_path);

}  // namespace muster
