#include "muster/mpi/bootstrap/pmix_launcher.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <link.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

#include "muster/base/bytes.h"
#include "muster/base/environment.h"
#include "muster/io/fd.h"
#include "muster/mpi/pmix_server.h"

namespace muster::mpi {
namespace {

/// The file of the PMIx that Open MPI has loaded, or of the installed one.
Result<std::string> pmix_library() {
  void* const library = dlopen("libpmix.so.2", RTLD_NOW);
  link_map* map = nullptr;
  if (library == nullptr || dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) {
    return fail(
        ErrorCode::kUnavailable,
        fmt::format("`muster run` starts ranks of Open MPI with the library of PMIx, which cannot be loaded: {}; "
                    "install libpmix2, or start them with mpirun",
                    dlerror()));
  }
  return std::string(map->l_name);
}

/// Until the other end is closed.
Result<std::string> read_all(const Fd& pipe, const Deadline& deadline) {
  std::string text;
  std::array<char, 4096> part;
  for (;;) {
    pollfd event{pipe.get(), POLLIN, 0};
    const int ready = poll(&event, 1, deadline.poll_timeout_ms());
    if (ready == 0) return fail(ErrorCode::kTimeout, "the process that serves PMIx did not start in time");
    if (ready < 0) continue;
    const ssize_t got = read(pipe.get(), part.data(), part.size());
    if (got <= 0) return text;
    text.append(part.data(), static_cast<size_t>(got));
  }
}

/// Starts `muster pmix-server`, and waits until it serves. Its first process ends at once, so that this one has no
/// child afterwards.
Result<> start_server(const std::string& library, Duration timeout) {
  const std::string program(environment("MUSTER_BIN"));
  const std::string seconds = std::to_string(std::chrono::ceil<std::chrono::seconds>(timeout).count());
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return fail(ErrorCode::kIo, fmt::format("no pipe: {}", std::strerror(errno)));
  const Fd answer(ends[0]);
  Fd write_end(ends[1]);
  std::array<std::string, 4> words = {program, kPmixServerCommand, library, seconds};
  std::array<char*, 5> argv{words[0].data(), words[1].data(), words[2].data(), words[3].data(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, write_end.get(), STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  pid_t child = 0;
  const int error = posix_spawn(&child, program.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    return fail(ErrorCode::kUnavailable, fmt::format("cannot start MUSTER_BIN={}: {}", program, std::strerror(error)));
  }
  write_end.reset();
  while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  MUSTER_ASSIGN(const std::string text, read_all(answer, Deadline::after(timeout)));
  if (text == kPmixServes) return {};
  return fail(ErrorCode::kUnavailable, text.empty() ? "the process that serves PMIx ended before it served" : text);
}

bool is_first_of_host(const JobRanks& ranks) {
  const auto same_host = [&](const JobRank& each) {
    return each.host == ranks.all[static_cast<size_t>(ranks.own)].host;
  };
  return std::ranges::find_if(ranks.all, same_host) - ranks.all.begin() == ranks.own;
}

}  // namespace

Result<std::vector<std::string>> serve_pmix(const JobRanks& ranks, Duration timeout) {
  MUSTER_ASSIGN(const std::string library, pmix_library());
  if (is_first_of_host(ranks)) MUSTER_TRY(start_server(library, timeout));
  MUSTER_ASSIGN(const auto found, get_all(*ranks.store, {pmix_variables_key(ranks.own)}, timeout));
  // Open MPI 4 takes a process without its own daemon for a single rank, unless jsrun, which uses PMIx, started it.
  std::vector<std::string> names = {"JSM_JSRUN_PORT"};
  setenv(names.front().c_str(), "0", 1);
  std::istringstream text(to_string(found.front()));
  for (std::string name, value; std::getline(text, name, '=') && std::getline(text, value);) {
    setenv(name.c_str(), value.c_str(), 1);
    names.push_back(name);
  }
  return names;
}

}  // namespace muster::mpi
