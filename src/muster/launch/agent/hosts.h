#pragma once

#include <string>
#include <vector>

#include "muster/launch/options/options.h"

namespace muster {

/// The command that a host of --hosts is to run, as words of this machine: ssh, the host, and one word for the shell
/// there. Neither the job's secret nor the password of --rdzv-endpoint is in it: host_input() is its standard input,
/// whose end is the node's end.
/// `options.hosts[node]` is the host; `folder`: where it is to run.
std::vector<std::string> host_command(const RunOptions& options, size_t node, const std::string& own_path,
                                      const std::string& folder, const Environment& environment);

std::string host_input(const RunOptions& options, const Bytes& secret);

/// `muster run --hosts`: starts an agent on each host by ssh, shows what they write with the host before each line, and
/// ends them all when one fails or a signal says so. Returns the exit status of the first that failed, else 0.
int run_hosts(const RunOptions& options, const std::string& own_path);

}  // namespace muster
