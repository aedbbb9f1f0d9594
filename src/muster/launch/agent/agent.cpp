#include "muster/launch/agent/agent.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "muster/base/host_name.h"
#include "muster/io/connect/handshake.h"
#include "muster/launch/agent/agent_monitor.h"
#include "muster/launch/agent/event_log.h"
#include "muster/launch/agent/node_store.h"
#include "muster/launch/agent/status_file.h"
#include "muster/launch/agent/supervisor.h"
#include "muster/launch/command.h"
#include "muster/launch/output/output_files.h"
#include "muster/launch/process_tree.h"
#include "muster/launch/rendezvous/coordinator.h"
#include "muster/launch/rendezvous/rendezvous_client.h"
#include "muster/launch/workers/worker_specs.h"
#include "muster/launch/workers/zygote.h"

namespace muster {
namespace {

constexpr Duration kLastWordTime =
    std::chrono::seconds(2);  // for a last word to the root: a lost one must not hold us up
constexpr Duration kTierPause = std::chrono::milliseconds(20);
constexpr Duration kPublishDelay = std::chrono::milliseconds(500);

// The life of one agent: it connects to the job's store, joins, and then does what the news say, generation by
// generation, until there is an outcome. Everything runs on the thread that drives the loop, but for connecting.
class Agent {
 public:
  Agent(const RunOptions& options, std::string own_path, std::string scratch, DeathNotice& last_word, Loop& loop)
      : options_(options),
        own_path_(std::move(own_path)),
        scratch_(std::move(scratch)),
        last_word_(last_word),
        loop_(loop),
        console_(loop) {}
  ~Agent();
  int run();

 private:
  Result<> prepare();
  void start_zygote();
  Supervisor::Events events();

  void connect(bool direct);
  void on_connected(bool direct);
  Result<> meet();
  NodeInfo self() const;
  void disconnect();
  void watch_claim();
  void publish_workers();

  void on_news(const JobEvent& news, const std::optional<Assignment>& assignment);
  void on_lost(const Error& why);
  void begin(const Assignment& assignment, const std::string& text);
  Result<> start_workers(const Assignment& assignment);
  std::vector<WorkerSpec> specs() const;
  void stop_workers();
  void go_on_when_stopped();

  void on_failed(const WorkerExit& exit, const std::string& report);
  void on_signal(int number);
  void tell(NodeEvent::Kind kind, Outcome outcome = {});
  void end(Outcome outcome);
  void settle(Outcome outcome);
  void settle_lost(const std::string& why);
  void say(const std::string& text);
  void leave();
  void leave_error_file() const;
  bool several() const { return options_.nnodes_max > 1; }
  bool finished() const;
  std::string store_lost() const;

  const RunOptions& options_;
  const std::string own_path_, scratch_, host_ = host_name();
  const std::string id_ = to_hex(ByteView(generate_secret()).first(8));
  DeathNotice& last_word_;
  Loop& loop_;
  Console console_;
  Environment environment_ = current_environment();
  Result<std::vector<std::string>> command_;
  std::unique_ptr<OutputFiles> outputs_;
  std::optional<EventLog> events_;
  std::vector<Cpus> cpus_;  // of each worker; empty: all
  std::unique_ptr<Zygote> zygote_;
  std::unique_ptr<Supervisor> supervisor_;

  std::thread connector_;
  std::atomic<bool> cancelled_ = false;
  bool connecting_ = false;
  std::optional<Result<NodeStore>> opened_;  // the connector's, until on_connected()
  NodeStore node_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<RendezvousClient> member_;
  Loop::TimerId claim_timer_ = 0, workers_timer_ = 0;
  StatusFile status_{environment_, options_.run_id};

  Assignment current_;
  bool placed_ = false;    // was ever in a generation
  bool running_ = false;   // this node has processes of a generation, or has not yet said that they are gone
  bool stopping_ = false;  // it is to say so
  bool leaving_ = false, rejoining_ = false, reconnecting_ = false;
  std::string said_;
  std::string lost_;                // what to say where the root is not found again; empty: what kept it from that
  std::optional<Outcome> failure_;  // of this generation's, on this node
  std::string failure_file_;        // what is known of it, in torch's form
  std::optional<Outcome> outcome_;
};

Agent::~Agent() {
  for (const auto timer : {claim_timer_, workers_timer_})
    if (timer != 0) loop_.cancel(timer);
  cancelled_ = true;
  if (connector_.joinable()) connector_.join();
  disconnect();
}

// The server goes first: it ends the waits of the others' threads, whatever became of the root.
void Agent::disconnect() {
  coordinator_.reset();
  node_.server.reset();
  member_.reset();
  node_.give_up_root(options_.run_id, Deadline::after(kLastWordTime));
  node_ = {};
  status_.store_found("", {});
}

Result<> Agent::prepare() {
  adopt_orphans();
  command_ = worker_command(options_, own_path_, environment_);
  if (!command_ && !several()) return tl::unexpected(command_.error());
  if (!options_.local_addr.empty()) MUSTER_TRY(interface_address(options_.local_addr));
  MUSTER_ASSIGN(outputs_, OutputFiles::create(loop_, console_, options_, environment_, scratch_));
  MUSTER_ASSIGN(events_, EventLog::open(options_, host_, console_));
  events_->record("run_started", {{"nproc", options_.nproc}, {"nnodes", options_.nnodes_max}});
  MUSTER_ASSIGN(cpus_, worker_cpus(options_));
  if (command_) start_zygote();
  const Supervisor::Options options{host_, *outputs_, options_.signals, options_.shutdown_timeout, zygote_.get()};
  MUSTER_ASSIGN(supervisor_, Supervisor::create(loop_, console_, options, events()));
  return {};
}

// Importing torch takes longer than all else, so it begins first.
void Agent::start_zygote() {
  const auto method = options_.start_method.value_or(StartMethod::kZygote);
  if (method != StartMethod::kZygote || !Zygote::can_fork(command_->front(), *command_)) return;
  Zygote::Options zygote{command_->front(), options_.preload,
                         shared_environment(environment_, this_machine().cpus, options_.nproc), options_.warm};
  zygote.asked = options_.start_method.has_value() || !options_.preload.empty();
  // One worker that is started once gains nothing by a fork, unless torch was imported before.
  zygote.again = options_.max_restarts > 0 || options_.elastic();
  zygote.cold = zygote.asked || options_.nproc > 1 || zygote.again;
  zygote_ = std::make_unique<Zygote>(loop_, console_, std::move(zygote));
}

Supervisor::Events Agent::events() {
  return {
      [this](const WorkerExit& exit) {
        events_->record("worker_ended",
                        {{"rank", exit.rank}, {"worker_pid", exit.pid}, {"code", exit.code}, {"signal", exit.signal}});
        const nlohmann::json value = {
            {"host", exit.host}, {"pid", exit.pid}, {"code", exit.code}, {"signal", exit.signal}};
        if (member_)
          member_->publish(member_->keys().exits(current_.generation) + std::to_string(exit.rank),
                           to_bytes(value.dump()));
      },
      [this](const WorkerExit& exit, const std::string& report) { on_failed(exit, report); },
      [this] { tell(NodeEvent::Kind::kDone); },
      [this](int number) { on_signal(number); },
      [this](const Error& error) {
        end({exit_status(error), error.message + " (host " + host_ + ")"});
      },
  };
}

// Looking names up, dialling and waiting for the root all block.
void Agent::connect(bool direct) {
  connecting_ = true;
  connector_ = std::thread([this, direct] {
    const NodeStoreEvents events{
        [this](std::string text) { loop_.post([this, text = std::move(text)] { console_.notice(text); }); },
        &cancelled_};
    opened_ = open_node_store(options_, events, direct);
    loop_.post([this, direct] { on_connected(direct); });
  });
}

void Agent::on_connected(bool direct) {
  connector_.join();
  connecting_ = false;
  Result<NodeStore> opened = *std::exchange(opened_, std::nullopt);
  if (outcome_) return;
  if (!opened && direct) return settle_lost(lost_.empty() ? opened.error().message : lost_);
  if (!opened) return settle({opened.error().code == ErrorCode::kInvalidArgument ? 2 : 1, opened.error().message});
  node_ = std::move(*opened);
  last_word_.prepare({node_.upstream, node_.session, node_.root_url, JobKeys(options_.run_id).inbox(),
                      encode(NodeEvent{NodeEvent::Kind::kKilled, id_})});
  if (const auto met = meet(); !met) return settle({1, met.error().message});
  if (command_) return member_->join(self());
  end({exit_status(command_.error()), command_.error().message + " (host " + host_ + ")"});
}

Result<> Agent::meet() {
  if (node_.root) {
    MUSTER_ASSIGN(auto store, open_store(node_.url, node_.secret, Deadline::after(kLeaveTime)));
    MUSTER_ASSIGN(coordinator_,
                  Coordinator::start(std::move(store), options_.run_id, rendezvous_options(options_),
                                     {node_.external_store.get(), node_.claim.get()},
                                     [this](const Error& why) { loop_.post([this, why] { on_lost(why); }); }));
    if (node_.claim) watch_claim();
  }
  MUSTER_ASSIGN(auto store, open_store(node_.url, node_.secret, Deadline::after(kLeaveTime)));
  RendezvousClient::Events events;
  events.news = [this](const JobEvent& news, const std::optional<Assignment>& assignment) {
    loop_.post([this, news, assignment] { on_news(news, assignment); });
  };
  events.lost = [this](const Error& why) { loop_.post([this, why] { on_lost(why); }); };
  MUSTER_ASSIGN(member_, RendezvousClient::start(std::move(store), {options_.run_id, id_, options_.heartbeat_timeout},
                                                 std::move(events)));
  status_.store_found(node_.url, node_.secret);
  return {};
}

NodeInfo Agent::self() const {
  NodeInfo node;
  node.host = host_;
  node.pid = static_cast<int>(::getpid());
  node.nproc = options_.nproc;
  node.min_nodes = options_.nnodes_min;
  node.max_nodes = options_.nnodes_max;
  node.max_restarts = options_.max_restarts;
  node.role = options_.role;
  node.wanted = options_.node_rank;
  // Workers of a job with a fixed root expect rank 0 there.
  if (node_.root && !node_.external_store) node.wanted = 0;
  if (placed_) {
    node.last_rank = current_.place.node_rank;
    node.last_nnodes = current_.place.nnodes;
  }
  return node;
}

// The workers are stopped before a new root starts theirs.
void Agent::watch_claim() {
  claim_timer_ = loop_.after(options_.heartbeat_timeout / 10, [this] {
    claim_timer_ = 0;
    if (!node_.claim || outcome_) return;
    if (node_.claim->held()) return watch_claim();
    on_lost(fail(ErrorCode::kPeerLost, "this node could not renew its claim to be the job's root").value());
  });
}

// For people, who do not mind to see a worker a second after its start.
void Agent::publish_workers() {
  workers_timer_ = 0;
  if (!running_ || outcome_ || !member_) return;
  const auto pids = supervisor_->pids();
  member_->publish(member_->keys().workers(current_.generation) + std::to_string(current_.place.node_rank),
                   to_bytes(nlohmann::json(pids).dump()));
  if (std::find(pids.begin(), pids.end(), 0) != pids.end())
    workers_timer_ = loop_.after(kPublishDelay, [this] { publish_workers(); });
}

void Agent::on_news(const JobEvent& news, const std::optional<Assignment>& assignment) {
  if (outcome_ || (connecting_ && news.kind != JobEvent::Kind::kOutcome)) return;  // of a root that was lost since
  switch (news.kind) {
    case JobEvent::Kind::kStart:
      if (assignment) return begin(*assignment, news.text);
      return say("all nodes of the job are there: this one waits for room");
    case JobEvent::Kind::kStop:
      if (!running_ || news.generation != current_.generation) return;
      say(news.text);
      stopping_ = true;
      return stop_workers();
    case JobEvent::Kind::kOutcome:
      return settle(news.outcome);
    case JobEvent::Kind::kRefused:
      return settle({1, news.text});
    case JobEvent::Kind::kEvicted:
      if (std::exchange(rejoining_, true)) return;
      say("the job's root has given this node up, because it did not hear from it for long: joining again");
      return stop_workers();
    case JobEvent::Kind::kProgress:
      if (!running_) console_.err().progress(this, "muster: ", news.text);
  }
}

void Agent::begin(const Assignment& assignment, const std::string& text) {
  if (running_) return;
  current_ = assignment;
  running_ = placed_ = true;
  stopping_ = false;
  failure_.reset();
  const Placement& place = assignment.place;
  events_->record("generation_began", {{"generation", assignment.generation},
                                       {"restarts", assignment.restarts},
                                       {"node_rank", place.node_rank},
                                       {"nnodes", place.nnodes},
                                       {"world_size", place.world_size}});
  if (assignment.generation > 0) say(fmt::format("generation {} begins: {}", assignment.generation, text));
  if (const auto started = start_workers(assignment); !started)
    end({exit_status(started.error()), started.error().message + " (host " + host_ + ")"});
  if (workers_timer_ != 0) loop_.cancel(workers_timer_);
  workers_timer_ = loop_.after(kPublishDelay, [this] { publish_workers(); });
}

Result<> Agent::start_workers(const Assignment& assignment) {
  // Workers learn the port from their environment. Several nodes may be on one host, so there any free one will do.
  MUSTER_TRY(node_.open_generation(assignment.generation, several() ? uint16_t{0} : options_.master_port));
  MUSTER_TRY(outputs_->begin_attempt(assignment.restarts));
  return supervisor_->start(specs());
}

std::vector<WorkerSpec> Agent::specs() const {
  JobEnvironment job;
  job.placement = current_.place;
  job.run_id = options_.run_id;
  job.role = options_.role;
  job.store_url = node_.url;
  job.torch_port = node_.torch_port;
  job.secret = node_.secret;
  job.interface = node_.interface;
  job.cpus = this_machine().cpus;
  job.generation = current_.generation;
  job.restart_count = current_.restarts;
  job.max_restarts = options_.max_restarts;
  job.virtual_local_rank = options_.virtual_local_rank;
  auto specs = worker_specs(options_, job, *command_, environment_, cpus_);
  for (size_t local = 0; local < specs.size(); ++local)
    specs[local].environment["TORCHELASTIC_ERROR_FILE"] = outputs_->error_file(static_cast<int>(local));
  return specs;
}

void Agent::stop_workers() {
  if (running_) supervisor_->stop();
  go_on_when_stopped();
}

// What was put off until no process of the generation is left here.
void Agent::go_on_when_stopped() {
  const bool waiting_for_it = stopping_ || rejoining_ || reconnecting_ || leaving_;
  if (outcome_ || !waiting_for_it || (running_ && !supervisor_->gone())) return;
  if (std::exchange(running_, false) && stopping_) tell(NodeEvent::Kind::kStopped);
  stopping_ = false;
  if (leaving_) return settle({128 + SIGTERM, ""});
  if (std::exchange(reconnecting_, false)) {
    rejoining_ = false;
    disconnect();
    return connect(/*direct=*/true);
  }
  if (std::exchange(rejoining_, false)) member_->join(self());
}

void Agent::on_failed(const WorkerExit& exit, const std::string& report) {
  failure_ = Outcome{exit.status(), report};
  failure_file_ = outputs_->error_file(exit.rank - current_.place.first_rank);
  tell(NodeEvent::Kind::kFailed, *failure_);
}

void Agent::on_lost(const Error& why) {
  if (outcome_ || reconnecting_ || connecting_) return;  // while connecting: of the root that was lost, once more
  if (why.code == ErrorCode::kProtocol) return end({1, why.message});
  lost_ = node_.root_moves ? "" : store_lost();
  if (!node_.root_moves && node_.direct) return settle_lost(lost_);
  const char* next = node_.root_moves ? "its successor" : "it without the proxy between";
  say(fmt::format("lost the job's root at {} ({}): looking for {}", node_.root_url, why.message, next));
  reconnecting_ = true;
  stop_workers();
}

// A failure of this node's workers that came before may be why, and says more.
void Agent::settle_lost(const std::string& why) {
  Outcome outcome = failure_.value_or(Outcome{1, why});
  if (failure_) outcome.report += "\n  also " + why;
  settle(std::move(outcome));
}

std::string Agent::store_lost() const {
  return fmt::format("lost the job's store at {}: the `muster run` of node 0 has ended, or its host cannot be reached",
                     several() ? node_.root_url : node_.url);
}

void Agent::on_signal(int number) {
  events_->record("signal", {{"signal", std::string("SIG") + ::sigabbrev_np(number)}});
  // Nobody waits for a job whose launcher was killed; and who asks twice is in a hurry.
  const bool hurry = monitor_is_gone() || leaving_ || (outcome_ && outcome_->status != 0);
  if (hurry) supervisor_->kill();
  if (monitor_is_gone()) return end({128 + SIGKILL, "`muster run` was killed on host " + host_});
  const std::string what = fmt::format("SIG{} on host {}", ::sigabbrev_np(number), host_);
  const Outcome outcome{128 + number, what + ": stopping the workers (once more kills them)"};
  if (number != SIGTERM || !options_.elastic() || node_.root || !member_ || hurry) return end(outcome);
  // The system takes this host away: an elastic job goes on without it, if enough others are left.
  leaving_ = true;
  say(what + ": this node leaves the job (once more kills its workers)");
  tell(NodeEvent::Kind::kLeave, {outcome.status, what + ": it leaves the job"});
  if (!running_) go_on_when_stopped();
}

void Agent::tell(NodeEvent::Kind kind, Outcome outcome) {
  if (!member_) return;
  NodeEvent call{kind, id_, current_.generation};
  call.outcome = std::move(outcome);
  member_->send(std::move(call));
}

// The whole job ends, for a reason that only this node knows.
void Agent::end(Outcome outcome) {
  if (outcome_) return;
  tell(NodeEvent::Kind::kEnd, outcome);
  settle(std::move(outcome));
}

void Agent::settle(Outcome outcome) {
  if (outcome_) return;
  outcome_ = std::move(outcome);
  cancelled_ = true;
  say(outcome_->report);
  if (outcome_->status != 0 && running_) supervisor_->stop();
}

// A report may come twice: as the reason to stop a generation, and as the job's outcome.
void Agent::say(const std::string& text) {
  if (!text.empty() && text != said_) console_.notice(text);
  said_ = text;
}

bool Agent::finished() const { return outcome_ && !connecting_ && (!running_ || supervisor_->gone()); }

// The root's server must outlive the others' need of it.
void Agent::leave() {
  if (!member_) return;
  tell(NodeEvent::Kind::kBye);
  const bool heard = member_->flush(Deadline::after(kLastWordTime));
  // Nodes whose proxies link to this one's have their last words to send through it.
  const Deadline patience = Deadline::after(kLeaveTime);
  const auto has_tier_below = [this] { return node_.server->stat().clients > 1; };
  if (options_.store_fanout > 0 && !coordinator_)
    while (node_.server && has_tier_below() && !patience.passed()) loop_.run_once(Deadline::after(kTierPause));
  // Nodes that are yet to come must hear that this one's command cannot run.
  const int expected = command_ ? 0 : options_.nnodes_min;
  if (heard && coordinator_)
    (void)coordinator_->await_all_left(expected, Deadline::after(options_.shutdown_timeout + options_.close_timeout));
}

// For who started this launcher as a worker of its own: it reads why that failed in the file that it named.
void Agent::leave_error_file() const {
  const auto wanted = environment_.find("TORCHELASTIC_ERROR_FILE");
  if (wanted == environment_.end() || wanted->second.empty() || outcome_->status == 0) return;
  const bool ours = failure_ && failure_->report == outcome_->report;
  publish_error_file(wanted->second, ours ? failure_file_ : "", outcome_->status, outcome_->report);
}

int Agent::run() {
  if (const auto ready = prepare(); !ready) {
    // A program that cannot run has a status of its own; anything else that is wrong here was asked for wrongly.
    const bool asked_wrongly = command_ && ready.error().code == ErrorCode::kInvalidArgument;
    settle({asked_wrongly ? 2 : exit_status(ready.error()), ready.error().message});
  } else {
    connect(/*direct=*/false);
  }
  const auto over = [this] {
    go_on_when_stopped();
    return finished();
  };
  (void)loop_.run_until(over, Deadline::never());
  if (events_) events_->record("run_ended", {{"status", outcome_->status}, {"report", outcome_->report}});
  console_.flush(kFlushTime);
  leave_error_file();
  supervisor_.reset();  // signals have their usual effect again
  leave();
  return outcome_->status;
}

}  // namespace

int run_agent(const RunOptions& options, const std::string& own_path, const std::string& scratch,
              DeathNotice& last_word) {
  ::signal(SIGPIPE, SIG_IGN);
  auto loop = Loop::create();
  if (!loop) {
    ::dprintf(STDERR_FILENO, "muster: %s\n", loop.error().message.c_str());
    return 1;
  }
  return Agent(options, own_path, scratch, last_word, **loop).run();
}

}  // namespace muster
