#include <charconv>
#include <chrono>

#include "muster/cli/commands.h"
#include "muster/launch/failure.h"
#include "muster/mpi/pmix_server.h"

namespace muster {

int pmix_server_command(const std::string&, const std::vector<std::string>& args) {
  int seconds = 0;
  if (args.size() == 2) std::from_chars(args[1].data(), args[1].data() + args[1].size(), seconds);
  if (seconds <= 0) return print_error("pmix-server", "muster starts it itself, for ranks of Open MPI", 2);
  return mpi::run_pmix_server(args[0], std::chrono::seconds(seconds));
}

}  // namespace muster
