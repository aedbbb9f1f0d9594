#include "muster/launch/agent.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>

#include "muster/launch/command.h"
#include "muster/launch/environment.h"
#include "muster/launch/guard.h"
#include "muster/launch/job.h"
#include "muster/launch/node_store.h"
#include "muster/launch/process_tree.h"
#include "muster/launch/supervisor.h"

namespace muster {
namespace {

constexpr Duration kStoreTime =
    std::chrono::seconds(2);  // for a word to the job's store: a lost one must not hold us up
constexpr Duration kFlushTime = std::chrono::seconds(5);
constexpr Duration kLeaveTime = std::chrono::seconds(10);
constexpr Duration kForever = Duration::max();

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

class Agent {
 public:
  Agent(const RunOptions& options, std::string own_path, std::string scratch, Loop& loop)
      : options_(options), own_path_(std::move(own_path)), scratch_(std::move(scratch)), loop_(loop), console_(loop) {}
  ~Agent();
  int run();

 private:
  int refuse(const Error& error, int status);
  Result<> meet();
  Result<> start_workers();
  std::vector<WorkerSpec> specs() const;
  Supervisor::Events events();
  void watch_outcome();

  void on_all_well();
  void on_signal(int number);
  void conclude(Outcome proposed);
  void settle(Outcome outcome);
  void leave();
  bool several() const { return options_.nnodes_max > 1; }
  std::string store_lost() const;

  const RunOptions& options_;
  std::string own_path_, scratch_, host_ = host_name();
  Loop& loop_;
  Console console_;
  std::vector<std::string> command_;
  NodeStore node_;
  std::unique_ptr<Store> store_, watched_store_;
  std::optional<JobBoard> board_;
  Placement place_;
  std::unique_ptr<Supervisor> supervisor_;
  std::thread watcher_;
  std::optional<Outcome> outcome_;
};

Agent::~Agent() {
  node_.server.reset();  // ends the watcher's wait, whatever became of the root
  if (watcher_.joinable()) watcher_.join();
}

int Agent::refuse(const Error& error, int status) {
  console_.notice(error.message + (error.context.empty() ? "" : " (during " + error.context + ")"));
  console_.flush(Deadline::after(kFlushTime));
  return status;
}

Result<> Agent::meet() {
  if (!options_.local_addr.empty()) MUSTER_TRY(interface_address(options_.local_addr));
  const auto notice = [this](const std::string& text) { console_.notice(text); };
  MUSTER_ASSIGN(node_, open_node_store(options_, notice));
  MUSTER_ASSIGN(store_, open_store(node_.url, node_.secret, Deadline::after(kLeaveTime)));
  board_.emplace(*store_, options_.run_id);
  const NodeInfo self{host_, static_cast<int>(::getpid()), options_.nproc, options_.nnodes_max};
  const auto wanted = node_.root ? 0 : options_.node_rank;
  MUSTER_ASSIGN(place_, board_->join(self, wanted, options_.timeout));
  if (!options_.log_dir.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options_.log_dir, error);
    if (error) return fail(ErrorCode::kIo, "--log-dir " + options_.log_dir + ": " + error.message());
  }
  return {};
}

std::vector<WorkerSpec> Agent::specs() const {
  const JobEnvironment job{place_,       options_.run_id, options_.role, node_.url,          node_.torch_port,
                           node_.secret, node_.interface, scratch_,      this_machine().cpus};
  Environment base = current_environment();
  // Workers write to pipes: this tells them whether a terminal shows what they write, and so whether to draw a bar.
  base["MUSTER_TERMINAL"] = ::isatty(STDOUT_FILENO) == 1 ? "1" : "0";
  std::vector<WorkerSpec> specs;
  for (int local = 0; local < options_.nproc; ++local) {
    WorkerSpec spec{place_.first_rank + local, command_, worker_environment(job, local, base)};
    // A background process group may not read the terminal; a file or a pipe goes to rank 0.
    spec.keeps_stdin = spec.rank == 0 && ::isatty(STDIN_FILENO) == 0;
    specs.push_back(std::move(spec));
  }
  return specs;
}

Supervisor::Events Agent::events() {
  return {
      [this](const WorkerExit& exit) {
        const auto published = board_->publish_exit(exit, Deadline::after(kStoreTime));
        if (!published && !outcome_) conclude({1, store_lost(), place_.node_rank});
      },
      [this](const WorkerExit& exit, std::string report) {
        conclude({exit.status(), report, place_.node_rank});
      },
      [this] { on_all_well(); },
      [this](int number) { on_signal(number); },
  };
}

Result<> Agent::start_workers() {
  adopt_orphans();
  const Supervisor::Options options{host_, options_.log_dir, options_.shutdown_timeout};
  MUSTER_ASSIGN(supervisor_, Supervisor::create(loop_, console_, options, events()));
  return supervisor_->start(specs());
}

// The store blocks its caller: a thread of its own waits for the word of another node.
void Agent::watch_outcome() {
  auto clone = store_->clone();
  if (!clone) return conclude({1, store_lost(), place_.node_rank});
  watched_store_ = std::move(*clone);
  watcher_ = std::thread([this] {
    auto outcome = JobBoard(*watched_store_, options_.run_id).await_outcome(Deadline::after(kForever));
    loop_.post([this, outcome] { settle(outcome.value_or(Outcome{1, store_lost(), place_.node_rank})); });
  });
}

std::string Agent::store_lost() const {
  return fmt::format("lost the job's store at {}: the `muster run` of node 0 has ended, or its host cannot be reached",
                     several() ? node_.root_url : node_.url);
}

void Agent::on_all_well() {
  if (!several()) return settle(Outcome{});
  if (!board_->node_done(options_.nnodes_max, Deadline::after(kStoreTime)))
    conclude({1, store_lost(), place_.node_rank});
}

void Agent::on_signal(int number) {
  // Nobody waits for a job whose launcher was killed; and who asks twice is in a hurry.
  if (guard_is_gone() || (outcome_ && outcome_->status != 0)) supervisor_->kill();
  if (guard_is_gone()) return conclude({128 + SIGKILL, "`muster run` was killed on host " + host_, place_.node_rank});
  conclude({128 + number,
            fmt::format("SIG{} on host {}: stopping the workers (once more kills them)", ::sigabbrev_np(number), host_),
            place_.node_rank});
}

void Agent::conclude(Outcome proposed) {
  if (outcome_) return;
  if (several()) {
    auto holds = board_->conclude(proposed, Deadline::after(kStoreTime));
    if (holds) {
      proposed = std::move(*holds);
    } else if (proposed.report != store_lost()) {
      proposed.report += "\n  also " + store_lost();
    }
  }
  settle(std::move(proposed));
}

void Agent::settle(Outcome outcome) {
  if (outcome_) return;
  outcome_ = std::move(outcome);
  if (!outcome_->report.empty()) console_.notice(outcome_->report);
  if (outcome_->status != 0 && supervisor_) supervisor_->stop();
}

// The root's server must outlive the others' need of it.
void Agent::leave() {
  if (!several() || !board_->leave(options_.nnodes_max, Deadline::after(kStoreTime))) return;
  if (node_.root) (void)board_->await_all_left(Deadline::after(options_.shutdown_timeout + kLeaveTime));
}

int Agent::run() {
  auto command = worker_command(options_, own_path_, current_environment());
  if (!command) return refuse(command.error(), exit_status(command.error()));
  command_ = std::move(*command);
  if (const auto met = meet(); !met)
    return refuse(met.error(), met.error().code == ErrorCode::kInvalidArgument ? 2 : 1);
  if (const auto started = start_workers(); !started) {
    if (!supervisor_) return refuse(started.error(), 1);
    conclude({exit_status(started.error()), started.error().message + " (host " + host_ + ")", place_.node_rank});
  }
  if (several()) watch_outcome();
  (void)loop_.run_until([this] { return outcome_ && supervisor_->gone(); }, Deadline::after(kForever));
  console_.flush(Deadline::after(kFlushTime));
  supervisor_.reset();  // signals have their usual effect again
  leave();
  return outcome_->status;
}

}  // namespace

int run_agent(const RunOptions& options, const std::string& own_path, const std::string& scratch) {
  ::signal(SIGPIPE, SIG_IGN);
  auto loop = Loop::create();
  if (!loop) {
    ::dprintf(STDERR_FILENO, "muster: %s\n", loop.error().message.c_str());
    return 1;
  }
  return Agent(options, own_path, scratch, **loop).run();
}

}  // namespace muster
