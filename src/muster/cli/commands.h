#pragma once

#include <string>
#include <vector>

#include "muster/cli/completion.h"

namespace muster {

// The commands of `muster`. `own_path` is this program as it was called; `args` are the arguments after the command's
// name. Each function returns the exit status; 2 means a wrong command line.

/// `muster run`: runs the agent of this node under its monitor, or with --hosts starts agents on other hosts.
int run_command(const std::string& own_path, const std::vector<std::string>& args);
/// `muster warm`, `muster warm status`, `muster warm stop`: keeps a Python process that has imported torch.
int warm_command(const std::string& own_path, const std::vector<std::string>& args);
/// `muster status [--watch] [--json] [RUN_ID]`: the jobs of this user's agents on this host. 1 if there is none.
int status_command(const std::string& own_path, const std::vector<std::string>& args);
/// `muster dump [PID...]`, `muster dump --job RUN_ID`: the last operations of the groups and the last remote calls of
/// running processes, and what they wait for. Reads their memory, because they may hang or be stopped. 1 if none has
/// any.
int dump_command(const std::string& own_path, const std::vector<std::string>& args);
/// `muster trace [-o FILE] [PID...]`: the last operations as a trace for Perfetto, with all ranks on one clock.
int trace_command(const std::string& own_path, const std::vector<std::string>& args);
/// `muster rpc top [PID...]`: the remote calls of running processes by function and peer, live. 1 if there is no
/// worker.
int rpc_command(const std::string& own_path, const std::vector<std::string>& args);
/// `muster store`: serves a store or reads and writes one. 1 if a key is missing or a wait timed out, 3 if the store
/// cannot be reached or refuses.
int store_command(const std::string& own_path, const std::vector<std::string>& args);
/// The subcommands of `muster store`, for the shell's completion.
std::vector<CommandSyntax> store_subcommands();
/// `muster explain COLLECTIVE`: which form or algorithm runs, its predicted time, and its steps.
/// `muster explain graph`: the plan of a compiled graph.
int explain_command(const std::string& own_path, const std::vector<std::string>& args);
/// `muster tune [--show]`: measures the costs of links and reductions on this machine, in a few seconds, and saves them
/// for the groups that are formed later. 1 if this is not possible.
int tune_command(const std::string& own_path, const std::vector<std::string>& args);

/// `muster pmix-server LIBRARY SECONDS`, which help does not list: muster starts it for ranks of Open MPI.
int pmix_server_command(const std::string& own_path, const std::vector<std::string>& args);

/// Replaces this process by a Python that runs `module`, as `python -m` does. Returns only if that is not possible,
/// with the exit status for `muster`; the error is printed.
int run_module(const char* module, const std::string& own_path, const std::vector<std::string>& args);

}  // namespace muster
