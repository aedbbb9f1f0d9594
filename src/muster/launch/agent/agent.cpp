#include "muster/launch/agent/agent.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "muster/base/host_name.h"
#include "muster/io/address.h"
#include "muster/io/host_identity.h"
#include "muster/launch/agent/agent_monitor.h"
#include "muster/launch/agent/agent_state_machine.h"
#include "muster/launch/agent/event_log.h"
#include "muster/launch/agent/health_server.h"
#include "muster/launch/agent/root_connection.h"
#include "muster/launch/agent/supervisor.h"
#include "muster/launch/agent/worker_timers.h"
#include "muster/launch/command.h"
#include "muster/launch/output/output_files.h"
#include "muster/launch/process_tree.h"
#include "muster/launch/signals.h"
#include "muster/launch/timer.h"
#include "muster/launch/workers/worker_environment.h"
#include "muster/launch/workers/zygote.h"

namespace muster {
namespace {

constexpr Duration kPublishDelay = std::chrono::milliseconds(500);

// A container may have its own network, with no interface up.
bool is_loopback_up() { return local_address_towards(*Address::parse("127.0.0.1:0")).has_value(); }

// Carries out the decisions of the state machine. Everything runs on the thread that drives the loop.
//
// It has more than 12 fields and 15 functions, because it owns all parts of an agent and passes events between them.
class Agent : AgentActions {
 public:
  Agent(const RunOptions& options, std::string own_path, std::string scratch, DeathNotice& death_notice, Loop& loop)
      : options_(options),
        own_path_(std::move(own_path)),
        scratch_(std::move(scratch)),
        loop_(loop),
        console_(loop),
        root_(loop, options, death_notice, root_events()) {}
  int run();

 private:
  // AgentActions
  void reconnect() override { root_.reconnect(); }
  void join() override;
  void send(NodeEvent event) override { root_.send(std::move(event)); }
  Result<> start_workers(const Assignment& assignment) override;
  void stop_workers(int number) override { supervisor_->stop(number); }
  void kill_workers() override { supervisor_->kill(); }
  void notice(const std::string& text) override { console_.notice(text); }
  void progress(const std::string& text) override { console_.err().progress(this, "muster: ", text); }

  Result<> prepare();
  void start_zygote();
  RootConnection::Events root_events();
  Supervisor::Events worker_events();
  WorkerTimers::Events timer_events();
  void on_connected(const Result<>& connected);
  void on_signal(int number);
  std::vector<WorkerSpec> worker_specs_of(const Assignment& assignment);
  void publish_workers();
  void leave_error_file() const;
  std::string own_address();
  bool several() const { return options_.nnodes_max > 1; }

  const RunOptions& options_;
  const std::string own_path_, scratch_, host_ = host_name();
  Loop& loop_;
  Console console_;
  Environment environment_ = current_environment();
  Result<std::vector<std::string>> command_;
  std::unique_ptr<OutputFiles> outputs_;
  std::optional<EventLog> event_log_;
  std::unique_ptr<HealthServer> health_;  // null: not asked for
  std::unique_ptr<WorkerTimers> timers_;  // null: not asked for
  std::vector<Cpus> cpus_;                // CPUs of each worker; empty: all CPUs
  std::unique_ptr<Zygote> zygote_;
  std::unique_ptr<Supervisor> supervisor_;
  AgentStateMachine state_{*this, host_, options_.elastic()};
  RootConnection root_;
  std::optional<Assignment> last_;  // the last assignment that gave this node a place
  Timer publish_timer_{loop_};
  std::string failure_file_;  // of the worker that failed in this generation, in torch's format
};

Result<> Agent::prepare() {
  adopt_orphans();
  command_ = worker_command(options_, own_path_, environment_);
  if (!command_ && !several()) return tl::unexpected(command_.error());
  if (!options_.local_addr.empty()) MUSTER_TRY(interface_address(options_.local_addr));
  if (!is_loopback_up())
    console_.notice("the loopback interface is down: workers cannot reach MASTER_ADDR until `ip link set lo up`");
  MUSTER_ASSIGN(health_, HealthServer::from_environment(loop_, environment_));
  MUSTER_ASSIGN(outputs_, OutputFiles::create(loop_, console_, options_, environment_, scratch_));
  MUSTER_ASSIGN(event_log_, EventLog::open(options_, host_, console_));
  event_log_->record("run_started", {{"nproc", options_.nproc}, {"nnodes", options_.nnodes_max}});
  MUSTER_ASSIGN(cpus_, worker_cpus(options_));
  if (command_) start_zygote();
  const Supervisor::Options options{host_, *outputs_, handled_signals(options_.signals), options_.shutdown_timeout,
                                    zygote_.get()};
  MUSTER_ASSIGN(supervisor_, Supervisor::create(loop_, console_, options, worker_events()));
  MUSTER_ASSIGN(timers_, WorkerTimers::from_environment(loop_, environment_, scratch_, timer_events()));
  return {};
}

// Starts the import of torch first, because it takes longer than all other steps.
void Agent::start_zygote() {
  const auto method = options_.start_method.value_or(StartMethod::kZygote);
  if (method != StartMethod::kZygote || !Zygote::can_fork(command_->front(), *command_)) return;
  Zygote::Options zygote{command_->front(), options_.preload,
                         shared_environment(environment_, this_machine().cpus, options_.nproc), options_.warm};
  zygote.asked = options_.start_method.has_value() || !options_.preload.empty();
  // A single worker that is started once gains nothing from a fork, unless a warm zygote exists.
  zygote.again = options_.max_restarts > 0 || options_.elastic();
  zygote.cold = zygote.asked || options_.nproc > 1 || zygote.again;
  zygote_ = std::make_unique<Zygote>(loop_, console_, std::move(zygote));
}

RootConnection::Events Agent::root_events() {
  return {
      [this](const std::string& text) { console_.notice(text); },
      [this](const Result<>& connected) { on_connected(connected); },
      [this](const JobEvent& event, const std::optional<Assignment>& assignment) {
        state_.job_event(event, assignment);
      },
      [this](const Error& why) { state_.root_lost(why); },
  };
}

Supervisor::Events Agent::worker_events() {
  return {
      [this](const WorkerExit& exit) {
        event_log_->record(
            "worker_ended",
            {{"rank", exit.rank}, {"worker_pid", exit.pid}, {"code", exit.code}, {"signal", exit.signal}});
        const nlohmann::json value = {
            {"host", exit.host}, {"pid", exit.pid}, {"code", exit.code}, {"signal", exit.signal}};
        root_.publish(JobKeys(options_.run_id).exits(last_->generation) + std::to_string(exit.rank), value.dump());
      },
      [this](const WorkerExit& exit, const std::string& report) {
        failure_file_ = outputs_->error_file(exit.rank - last_->placement.first_rank);
        state_.worker_failed({exit.status(), report});
      },
      [this] { state_.workers_succeeded(); },
      [this](int number) { on_signal(number); },
      [this](const Error& error) { state_.start_failed(error); },
  };
}

WorkerTimers::Events Agent::timer_events() {
  return {
      [this](const WorkerTimers::Expired& timer) {
        event_log_->record("timer_expired",
                           {{"worker_pid", timer.pid}, {"scope", timer.scope}, {"signal", timer.signal}});
        const std::string what = "its timer '" + timer.scope + "' has expired";
        console_.notice(fmt::format("process {} on host {}: {}", timer.pid, host_, what));
        if (timer.signal != 0) supervisor_->expect_end(timer.pid, timer.signal, what);
      },
      [this](const std::string& text) { console_.notice(text); },
  };
}

void Agent::on_connected(const Result<>& connected) {
  if (!connected) {
    const bool wrong_option = connected.error().code == ErrorCode::kInvalidArgument;
    return state_.root_not_found({wrong_option ? 2 : 1, connected.error().message});
  }
  if (!command_) return state_.start_failed(command_.error());
  const NodeStore& node = root_.node();
  state_.root_found({.url = several() ? node.root_url : node.url,
                     .is_here = node.root,
                     .moves = node.root_moves,
                     .may_leave = node.root_moves || options_.rdzv_url.empty(),
                     .direct = node.direct});
}

void Agent::on_signal(int number) {
  const std::string name = signal_name(number);
  event_log_->record("signal", {{"signal", name}});
  if (options_.ends_job(number)) return state_.signaled(number, monitor_is_gone());
  if (!state_.has_workers()) return;
  console_.notice(name + " on host " + host_ + ": passed to the workers");
  supervisor_->forward(number);
}

void Agent::join() {
  NodeInfo node{.host = host_,
                .process_domain = process_domain(),
                .pid = static_cast<int>(::getpid()),
                .nproc = options_.nproc,
                .min_nodes = options_.nnodes_min,
                .max_nodes = options_.nnodes_max,
                .role = options_.role,
                .wanted = options_.node_rank,
                .max_restarts = options_.max_restarts,
                .address = own_address()};
  if (last_) {
    node.last_rank = last_->placement.node_rank;
    node.last_nnodes = last_->placement.nnodes;
  }
  root_.join(std::move(node));
}

// The address where this node's workers listen for other nodes.
std::string Agent::own_address() {
  if (!several()) return "127.0.0.1";
  std::string interface = root_.node().interface;
  if (interface.empty()) interface = value_of(environment_, "MUSTER_INTERFACE");
  const auto address = interface_address(interface);
  return address ? address->host() : interface;
}

// Publishes the workers' PIDs for `muster status`, where a short delay does no harm.
void Agent::publish_workers() {
  if (state_.phase() != AgentPhase::kRunning) return;
  const auto pids = supervisor_->pids();
  root_.publish(JobKeys(options_.run_id).workers(last_->generation) + std::to_string(last_->placement.node_rank),
                nlohmann::json(pids).dump());
  if (std::find(pids.begin(), pids.end(), 0) != pids.end())
    publish_timer_.start(kPublishDelay, [this] { publish_workers(); });
}

Result<> Agent::start_workers(const Assignment& assignment) {
  last_ = assignment;
  const Placement& placement = assignment.placement;
  event_log_->record("generation_began", {{"generation", assignment.generation},
                                          {"restarts", assignment.restarts},
                                          {"node_rank", placement.node_rank},
                                          {"nnodes", placement.nnodes},
                                          {"world_size", placement.world_size}});
  publish_timer_.start(kPublishDelay, [this] { publish_workers(); });
  // Workers learn the port from their environment. With several nodes any free port is used, because nodes may share a
  // host.
  MUSTER_TRY(root_.node().open_generation(assignment.generation, several() ? uint16_t{0} : options_.master_port));
  MUSTER_TRY(outputs_->begin_attempt(assignment.restarts));
  return supervisor_->start(worker_specs_of(assignment));
}

std::vector<WorkerSpec> Agent::worker_specs_of(const Assignment& assignment) {
  const NodeStore& node = root_.node();
  const JobEnvironment job{.placement = assignment.placement,
                           .store_url = node.url,
                           .torch_port = node.torch_port,
                           .secret = node.secret,
                           .interface = node.interface,
                           .node0_addr = assignment.node0_addr,
                           .generation = assignment.generation,
                           .restart_count = assignment.restarts};
  auto specs = worker_specs(options_, job, *command_, environment_, cpus_);
  for (size_t local = 0; local < specs.size(); ++local)
    specs[local].environment["TORCHELASTIC_ERROR_FILE"] = outputs_->error_file(static_cast<int>(local));
  if (timers_)
    for (auto& spec : specs) spec.environment["TORCHELASTIC_TIMER_FILE"] = timers_->path();
  return specs;
}

// If another launcher started this one as a worker, that launcher reads the reason of a failure from this file.
void Agent::leave_error_file() const {
  const Outcome& outcome = *state_.outcome();
  const std::string wanted = value_of(environment_, "TORCHELASTIC_ERROR_FILE");
  if (wanted.empty() || outcome.status == 0) return;
  const bool ours = state_.failure() && state_.failure()->report == outcome.report;
  publish_error_file(wanted, ours ? failure_file_ : "", outcome.status, outcome.report);
}

int Agent::run() {
  if (const auto ready = prepare(); !ready) {
    // A program that cannot run has its own exit status. Once the command is known, kInvalidArgument means a wrong
    // option.
    const bool wrong_option = command_ && ready.error().code == ErrorCode::kInvalidArgument;
    state_.finish({wrong_option ? 2 : exit_status(ready.error()), ready.error().message});
  } else {
    root_.connect();
  }
  const auto done = [this] {
    if (supervisor_ && supervisor_->gone()) state_.workers_gone();
    return state_.phase() == AgentPhase::kDone;
  };
  (void)loop_.run_until(done, Deadline::never());
  const Outcome& outcome = *state_.outcome();
  if (event_log_) event_log_->record("run_ended", {{"status", outcome.status}, {"report", outcome.report}});
  console_.flush(kFlushTime);
  leave_error_file();
  timers_.reset();
  supervisor_.reset();  // restores the default effect of signals
  for (const int number : kForwardedSignals)
    if (!options_.ends_job(number)) ::signal(number, SIG_IGN);  // there is no worker any more that could get it
  const Duration patience = options_.shutdown_timeout + options_.close_timeout;
  if (state_.hands_over() && root_.hand_over(patience)) return outcome.status;
  // Nodes that have not joined yet must hear that the command of this node cannot run.
  root_.leave(command_ ? 0 : options_.nnodes_min, patience);
  return outcome.status;
}

}  // namespace

int run_agent(const RunOptions& options, const std::string& own_path, const std::string& scratch,
              DeathNotice& death_notice) {
  ::signal(SIGPIPE, SIG_IGN);
  auto loop = Loop::create();
  if (!loop) {
    ::dprintf(STDERR_FILENO, "muster: %s\n", loop.error().message.c_str());
    return 1;
  }
  return Agent(options, own_path, scratch, death_notice, **loop).run();
}

}  // namespace muster
