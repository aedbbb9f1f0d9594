#include "muster/mpi/world.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "muster/base/log.h"
#include "muster/group/group.h"
#include "muster/mpi/bootstrap/job_ranks.h"
#include "muster/mpi/bootstrap/pmi_server.h"
#include "muster/mpi/bootstrap/pmix_launcher.h"
#include "muster/mpi/datatypes.h"
#include "muster/mpi/watchdog.h"

namespace muster::mpi {
namespace {

/// How long MPI_Finalize() may wait for the other ranks after a failure.
constexpr Duration kFinalizeTime = 30s;
/// How long the launcher has to forward the reason, before MPI_Abort() makes it end all processes and their output.
constexpr Duration kForwardTime = 200ms;
/// How long MPI_Abort() may take.
constexpr unsigned kAbortSeconds = 10;

std::atomic<const World*> world_in_use = nullptr;
std::atomic<pid_t> used_by = 0;  ///< the process that uses MPI: a forked child must not
bool initialized_here = false;   ///< by muster
std::atomic<bool> has_failed = false;
std::atomic<std::thread::id> aborting;  ///< the thread in World::abort()

std::function<void()>& last_callback() {
  static std::function<void()> callback;
  return callback;
}

void finalize() {
  const World* const world = World::current();
  if (world == nullptr || !world->is_running()) return;
  if (const std::thread::id other = aborting; other != std::thread::id()) {
    if (other == std::this_thread::get_id()) return;  // some MPI_Abort() call exit()
    for (;;) pause();                                 // that thread ends this process
  }
  Watchdog watchdog(*world);
  const Watchdog::Guard guard(watchdog, has_failed ? kFinalizeTime : kNoLimit, [] { return "MPI_Finalize"; });
  free_datatypes(world->mpi);
  (void)world->mpi.Finalize();
  if (last_callback()) last_callback()();
}

/// The launcher's variables, and torch's. A library that does not belong to the launcher finds one rank only.
Result<> check_environment(const World& world) {
  const std::pair<const char*, int> variables[] = {{"OMPI_COMM_WORLD_SIZE", world.size},
                                                   {"OMPI_COMM_WORLD_RANK", world.rank},
                                                   {"PMI_SIZE", world.size},
                                                   {"PMI_RANK", world.rank},
                                                   {"PMIX_RANK", world.rank},
                                                   {"WORLD_SIZE", world.size},
                                                   {"RANK", world.rank}};
  for (const auto& [variable, actual] : variables) {
    const char* set = std::getenv(variable);
    if (set == nullptr) continue;
    const std::string_view text(set);
    int number = -1;
    (void)std::from_chars(text.begin(), text.end(), number);
    if (number == actual) continue;
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("MPI has {} ranks and this is rank {}, but {}={}: start all ranks with the launcher of "
                            "{}, or set MUSTER_MPI_LIBRARY to the library of the launcher",
                            world.size, world.rank, variable, text, world.mpi.version()));
  }
  return {};
}

Result<> check_threads(const Library& mpi, int provided, bool initialized) {
  if (provided >= mpi.thread_multiple) return {};
  return fail(ErrorCode::kUnsupported, fmt::format("{} was {} without MPI_THREAD_MULTIPLE, which muster needs: {}",
                                                   mpi.version(), initialized ? "initialized by the program" : "built",
                                                   initialized ? "initialize it with that level, or let muster do so"
                                                               : "use a build that supports threads"));
}

/// Lets MPI find the ranks of `muster run`. Returns the variables that were set for it.
Result<std::vector<std::string>> serve_ranks(const Library& mpi) {
  MUSTER_ASSIGN(const GroupOptions options, group_options_from_environment());
  MUSTER_ASSIGN(JobRanks ranks, exchange_ranks(options.timeout));
  if (mpi.version().find("Open MPI") != std::string::npos) return serve_pmix(ranks, options.timeout);
  MUSTER_TRY(serve_pmi(std::move(ranks), options.timeout));
  return std::vector<std::string>{"PMI_FD", "PMI_RANK", "PMI_SIZE"};
}

Result<int> initialize(const Library& mpi) {
  std::vector<std::string> variables;
  if (started_by_muster()) {
    MUSTER_ASSIGN(variables, serve_ranks(mpi));
  }
  int provided = 0;
  const int code = mpi.Init_thread(nullptr, nullptr, mpi.thread_multiple, &provided);
  for (const std::string& variable : variables)
    unsetenv(variable.c_str());  // of no use to programs that this one starts
  MUSTER_TRY(mpi.check(code, "MPI_Init_thread"));
  mark_mpi_initialized();
  return provided;
}

Result<World> start() {
  last_callback();  // constructed before atexit(), so it is destroyed after finalize()
  MUSTER_ASSIGN(const Library* const mpi, Library::get());
  int initialized = 0, finalized = 0, provided = 0;
  MUSTER_TRY(mpi->check(mpi->Finalized(&finalized), "MPI_Finalized"));
  if (finalized != 0) return fail(ErrorCode::kAborted, "MPI was finalized: a process can use it once only");
  MUSTER_TRY(mpi->check(mpi->Initialized(&initialized), "MPI_Initialized"));
  if (initialized != 0) {
    MUSTER_TRY(mpi->check(mpi->Query_thread(&provided), "MPI_Query_thread"));
  } else {
    MUSTER_ASSIGN(provided, initialize(*mpi));
    initialized_here = true;
    std::atexit(finalize);
  }
  used_by = getpid();
  World world{*mpi};
  MUSTER_TRY(check_threads(*mpi, provided, initialized != 0));
  if (initialized == 0) {
    MUSTER_TRY(mpi->check(mpi->Comm_set_errhandler(mpi->comm_world, mpi->errors_return), "MPI_Comm_set_errhandler"));
  }
  MUSTER_TRY(mpi->check(mpi->Comm_rank(mpi->comm_world, &world.rank), "MPI_Comm_rank"));
  MUSTER_TRY(mpi->check(mpi->Comm_size(mpi->comm_world, &world.size), "MPI_Comm_size"));
  return world;
}

}  // namespace

Result<const World*> World::get() {
  static const Result<World> world = start();
  if (!world) return tl::unexpected(world.error());
  if (used_by != getpid()) {
    return fail(ErrorCode::kUnsupported, "this process was forked from one that uses MPI: start it with exec");
  }
  static const Result<> fits = check_environment(*world);
  world_in_use = &*world;  // an error of the environment must end the job, too
  if (!fits) return tl::unexpected(fits.error());
  return &*world;
}

const World* World::current() { return used_by == getpid() ? world_in_use.load() : nullptr; }

void World::abort(const std::string& why) const {
  log(LogLevel::kError, fmt::format("rank {} of MPI ends the job: {}", rank, why));
  aborting = std::this_thread::get_id();
  std::this_thread::sleep_for(kForwardTime);  // tidy: allow(sleep) the launcher does not say when it has
  (void)std::signal(SIGALRM, SIG_DFL);
  alarm(kAbortSeconds);
  (void)mpi.Abort(mpi.comm_world, 1);
  _exit(1);
}

void World::expect_failures() { has_failed = true; }

bool World::is_running() const {
  int finalized = 1;
  return mpi.Finalized(&finalized) == 0 && finalized == 0;
}

void World::after_finalize(std::function<void()> callback) {
  if (initialized_here) last_callback() = std::move(callback);
}

}  // namespace muster::mpi
