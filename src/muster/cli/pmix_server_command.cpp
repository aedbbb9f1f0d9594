#include <charconv>
#include <chrono>
#include <cstdio>

#include "muster/cli/commands.h"
#include "muster/launch/failure.h"
#include "muster/mpi/pmix_server.h"

namespace muster {

int pmix_server_command(const std::string&, const std::vector<std::string>& args) {
  if (!args.empty() && (args[0] == "--help" || args[0] == "-h")) {
    std::puts(
        "Lets ranks of Open MPI that `muster run` has started find each other. muster starts it itself.\n"
        "Usage: muster pmix-server LIBRARY SECONDS");
    return 0;
  }
  int seconds = 0;
  if (args.size() == 2) std::from_chars(args[1].data(), args[1].data() + args[1].size(), seconds);
  if (seconds <= 0) return print_error("pmix-server", "muster starts it itself, for ranks of Open MPI", 2);
  return mpi::run_pmix_server(args[0], std::chrono::seconds(seconds));
}

}  // namespace muster
