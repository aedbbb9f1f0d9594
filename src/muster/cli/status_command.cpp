#include "muster/cli/commands.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "muster/launch/failure.h"
#include "muster/launch/options/command_line.h"
#include "muster/launch/private_directories.h"
#include "muster/launch/rendezvous/rendezvous_messages.h"
#include "muster/store/stat.h"
#include "muster/store/store.h"

namespace muster {
namespace {

using nlohmann::json;

constexpr Duration kReadTime = std::chrono::seconds(2);             // for the store of one job
constexpr Duration kRateInterval = std::chrono::milliseconds(200);  // between two reads, for the rate
constexpr Duration kInterval = std::chrono::seconds(1);             // of --watch

json parse(const std::string& text) { return json::parse(text, nullptr, /*allow_exceptions=*/false); }

// Reads the status file of a live agent. Removes the file of a dead agent.
std::optional<json> read_live_agent(const std::filesystem::path& path) {
  if (remove_abandoned_file(path)) return std::nullopt;
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!file) return std::nullopt;
  std::array<char, 4096> text{};
  const ssize_t size = ::pread(file.get(), text.data(), text.size(), 0);
  json value = parse(std::string(text.data(), static_cast<size_t>(std::max<ssize_t>(size, 0))));
  for (const char* name : {"store", "secret", "run_id", "process_domain"})
    if (!value.contains(name)) return std::nullopt;
  return value;
}

Result<json> read_job(const json& agent) {
  const Deadline deadline = Deadline::after(kReadTime);
  MUSTER_ASSIGN(const Bytes secret, from_hex(agent["secret"].get<std::string>()));
  MUSTER_ASSIGN(const auto store, open_store(agent["store"].get<std::string>(), secret, deadline));
  const JobKeys keys(agent["run_id"].get<std::string>());
  MUSTER_ASSIGN(const Bytes bytes, store->get(keys.nodes(), deadline));
  json job = parse(to_string(bytes));
  if (!job.is_object() || !job["nodes"].is_array())
    return fail(ErrorCode::kProtocol, "the job's store has no list of nodes");
  for (json& node : job["nodes"]) {
    if (node["node_rank"] < 0) continue;
    const Key key = keys.workers(job["generation"].get<int>()) + std::to_string(node["node_rank"].get<int>());
    MUSTER_ASSIGN(const bool there, store->check({key}, deadline));
    if (!there) continue;
    MUSTER_ASSIGN(const Bytes pids, store->get(key, deadline));
    node["pids"] = parse(to_string(pids));
  }
  MUSTER_ASSIGN(const StoreStat before, store->stat(deadline));
  std::this_thread::sleep_for(kRateInterval);  // tidy: allow(sleep) a rate needs two reads
  MUSTER_ASSIGN(const StoreStat after, store->stat(deadline));
  const double seconds = std::max(after.uptime_seconds - before.uptime_seconds, 1e-3);
  job["store"] = {{"clients", after.clients},
                  {"keys", after.keys},
                  {"operations_per_second", static_cast<double>(after.operations - before.operations) / seconds},
                  {"uptime", after.uptime_seconds}};
  return job;
}

// True if the nodes of a job that is shown already include this agent. A job may have several agents on this host. The
// process domain is compared too, because agents on other hosts may have the same PID.
bool is_shown(const json& jobs, const json& agent) {
  const auto is_agent = [&](const json& node) {
    return node["pid"] == agent["pid"] && node.value("process_domain", json()) == agent["process_domain"];
  };
  return std::any_of(jobs.begin(), jobs.end(), [&](const json& job) {
    return job["run_id"] == agent["run_id"] && job.contains("nodes") &&
           std::any_of(job["nodes"].begin(), job["nodes"].end(), is_agent);
  });
}

json collect(const std::string& directory, const std::string& wanted) {
  json jobs = json::array();
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
    if (!entry.path().filename().string().starts_with("job-")) continue;
    const auto agent = read_live_agent(entry.path());
    if (!agent || (!wanted.empty() && (*agent)["run_id"] != wanted) || is_shown(jobs, *agent)) continue;
    json job = {{"run_id", (*agent)["run_id"]}, {"agent", (*agent)["pid"]}};
    if ((*agent)["store"] == "") {
      job["problem"] = "looking for the job's root";
    } else if (auto found = read_job(*agent)) {
      job.update(*found);
    } else {
      job["problem"] = found.error().message;
    }
    jobs.push_back(std::move(job));
  }
  return jobs;
}

std::string describe_nodes(const json& job) {
  std::vector<json> nodes(job["nodes"].begin(), job["nodes"].end());
  std::stable_sort(nodes.begin(), nodes.end(), [](const json& a, const json& b) {
    return static_cast<unsigned>(a["node_rank"].get<int>()) < static_cast<unsigned>(b["node_rank"].get<int>());
  });
  std::string text;
  int rank = 0;
  for (const json& node : nodes) {
    const int workers = node["workers"].get<int>();
    const bool member = node["node_rank"] >= 0;
    text += fmt::format("  {:<8} {:<8} host {}, agent {}, last heartbeat {:.1f} s ago",
                        member ? "node " + node["node_rank"].dump() : "no rank", node["state"].get<std::string>(),
                        node["host"].get<std::string>(), node["pid"].get<int>(), node["heard_ago"].get<double>());
    if (member) text += fmt::format(", ranks {}-{}", rank, rank + workers - 1);
    if (member) rank += workers;
    if (node.contains("pids")) text += ", pids " + node["pids"].dump();
    text += '\n';
  }
  return text;
}

std::string describe(const json& job) {
  const std::string name = fmt::format("job {} (agent {})", job["run_id"].get<std::string>(), job["agent"].dump());
  if (job.contains("problem")) return fmt::format("{}: {}\n", name, job["problem"].get<std::string>());
  const int generation = job["generation"].get<int>();
  const std::string state = generation < 0 ? "waiting for nodes" : fmt::format("generation {}", generation);
  const json& store = job["store"];
  return fmt::format("{}: {}, {}, {} restarts, up {:.0f} s\n{}  store: {} clients, {} keys, {:.0f} operations/s\n",
                     name, state, job["progress"].get<std::string>(), job["restarts"].get<int>(),
                     store["uptime"].get<double>(), describe_nodes(job), store["clients"].get<int64_t>(),
                     store["keys"].get<int64_t>(), store["operations_per_second"].get<double>());
}

void show(const json& jobs, const std::string& run_id, bool as_json) {
  std::string text;
  if (as_json) text = jobs.dump() + "\n";
  if (!as_json && jobs.empty())
    text = fmt::format("no job {}of this user runs on this host\n", run_id.empty() ? "" : run_id + " ");
  for (const json& job : jobs)
    if (!as_json) text += describe(job);
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

}  // namespace

int status_command(const std::string&, const std::vector<std::string>& args) {
  bool watch = false, as_json = false;
  std::string run_id;
  CLI::App app("Shows the jobs of this user on this host.", "muster status");
  app.add_flag("--watch,-w", watch, "repeat every second until interrupted or all jobs have ended");
  app.add_flag("--json", as_json, "print one JSON array, with --watch one per line");
  app.add_option("RUN_ID", run_id, "show only the job with this --rdzv-id")->type_name("");
  if (const auto end = parse_command_line(app, args)) return *end;
  const auto directory = user_directory(current_environment(), /*create=*/false);
  if (!directory) return print_error("status", directory.error().message, 1);
  while (true) {
    const json jobs = collect(*directory, run_id);
    if (watch && !as_json && ::isatty(STDOUT_FILENO) == 1) std::fputs("\x1b[H\x1b[2J", stdout);
    show(jobs, run_id, as_json);
    if (jobs.empty()) remove_user_directory(*directory);  // it may have had files of dead agents
    if (!watch || jobs.empty()) return jobs.empty() ? 1 : 0;
    std::this_thread::sleep_for(kInterval);  // tidy: allow(sleep) the interval of --watch
  }
}

}  // namespace muster
