// All connections at one thing together. A round is timed from the first request to the last reply.

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "cases.h"

namespace muster::load {
namespace {

struct Rounds {
  std::vector<double> times, cpu;
  Figures figures() const { return {{"time", quantile(times, 0.5)}, {"cpu", quantile(cpu, 0.5)}}; }
};

// Measures what `round` does with the fleet.
template <class Round>
Result<> time_round(const Setting& setting, Rounds& rounds, const Round& round) {
  const ServerProcess server(setting.pid);
  const double cpu = server.cpu_seconds();
  const TimePoint begin = steady_clock().now();
  MUSTER_TRY(round());
  rounds.times.push_back(seconds_since(begin));
  rounds.cpu.push_back(server.cpu_seconds() - cpu);
  return {};
}

Result<Figures> measure_barrier(const Setting& setting) {
  MUSTER_ASSIGN(Fleet fleet, connect_all(setting));
  Rounds rounds;
  for (size_t i = 0; i < setting.rounds; ++i) {
    // torch's server never resets a barrier, so each round has a key of its own.
    const Step step = barrier(fmt::format("{}/barrier/{:04}", setting.prefix, i), static_cast<int64_t>(fleet.size()));
    std::vector<bool> sent(fleet.size());
    const auto once = [&](size_t client) {
      const bool again = sent[client];
      sent[client] = true;
      return again ? nullptr : &step;
    };
    MUSTER_TRY(time_round(setting, rounds, [&] { return fleet.run(setting.deadline, once); }));
  }
  return rounds.figures();
}

EchoPlan barrier_floor(const Setting& setting) {
  const Step step = barrier(fmt::format("{}/barrier/{:04}", setting.prefix, 0), 1);
  return {.turns = {{step.request.size(), step.reply_bytes}}, .gather = setting.connections};
}

// A WAIT in two steps: until the server has it, which a PING behind it shows, and until it is released.
struct SplitWait {
  explicit SplitWait(const std::vector<std::string>& keys) : leave(wait(keys)) {
    enter = after(leave.request, ping());
    leave.request.clear();
  }
  Step enter, leave;
};

Result<> enter_all(const Setting& setting, Fleet& fleet, const std::vector<SplitWait>& waits) {
  for (size_t client = 0; client < fleet.size(); ++client) {
    MUSTER_TRY(fleet.begin(client, waits[client % waits.size()].enter));
  }
  return fleet.drive(setting.deadline);
}

// The floor's server takes one request more than there are clients for the release, whatever it is.
Result<> enter_echo(Fleet& fleet, const Step& wait) {
  for (size_t client = 0; client < fleet.size(); ++client) MUSTER_TRY(fleet.begin(client, wait));
  return {};
}

Result<> enter_release(const Setting& setting, Fleet& fleet, const std::vector<SplitWait>& waits) {
  MUSTER_TRY(enter_all(setting, fleet, waits));
  for (size_t client = 0; client < fleet.size(); ++client) MUSTER_TRY(fleet.begin(client, waits[0].leave));
  return {};
}

std::string release_key(const Setting& setting, size_t round) {
  return fmt::format("{}/release/{:04}", setting.prefix, round);
}

Result<Figures> measure_release(const Setting& setting) {
  MUSTER_ASSIGN(Fleet fleet, connect_all(setting));
  Rounds rounds;
  for (size_t i = 0; i < setting.rounds; ++i) {
    const std::string key = release_key(setting, i);
    const std::vector<SplitWait> waits{SplitWait({key})};
    const Step plain = wait({key});
    MUSTER_TRY(setting.echo ? enter_echo(fleet, plain) : enter_release(setting, fleet, waits));
    MUSTER_ASSIGN(Fleet setter, Fleet::create(!setting.echo));
    MUSTER_TRY(setter.connect(setting.server, 1, setting.deadline));
    const Step go = setting.echo ? plain : set(key, value_of(setting));
    MUSTER_TRY(time_round(setting, rounds, [&]() -> Result<> {
      MUSTER_TRY(setter.begin(0, go));
      MUSTER_TRY(fleet.drive(setting.deadline));
      return setter.drive(setting.deadline);
    }));
  }
  return rounds.figures();
}

EchoPlan release_floor(const Setting& setting) {
  const Step step = wait({release_key(setting, 0)});
  return {.turns = {{step.request.size(), step.reply_bytes}}, .gather = setting.connections + 1};
}

// One key of each client's own; or as many as the setting says, the same for all, as agents wait for each other's.
std::vector<std::string> never_set(const Setting& setting, size_t client) {
  if (setting.keys == 1) return {fmt::format("{}/never/{:08}", setting.prefix, client)};
  std::vector<std::string> keys;
  for (size_t i = 0; i < setting.keys; ++i) keys.push_back(fmt::format("{}/never/{:08}", setting.prefix, i));
  return keys;
}

// The child: enters all waits, says so through the pipe, and is killed.
[[noreturn]] void wait_to_be_killed(const Setting& setting, const Fd& ready) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto held = [&]() -> Result<> {
    MUSTER_ASSIGN(Fleet fleet, connect_all(setting));
    std::vector<SplitWait> waits;
    for (size_t client = 0; client < fleet.size(); ++client) waits.emplace_back(never_set(setting, client));
    if (!setting.echo) MUSTER_TRY(enter_all(setting, fleet, waits));
    char byte = 1;
    if (write(ready.get(), &byte, 1) != 1) return fail_errno(errno, "cannot say that all wait");
    for (;;) pause();
  }();
  std::fprintf(stderr, "muster-store-load: %s\n", held.error().to_string().c_str());
  _exit(1);
}

// Rounds of a probe until the server has forgotten the dead, which their descriptors show, and answers once more.
Result<> probe_until(const Setting& setting, Fleet& probe, size_t descriptors, double& longest) {
  const ServerProcess server(setting.pid);
  const Step step = ping();
  for (bool forgotten = false, over = false; !over;) {
    over = forgotten;
    const TimePoint begin = steady_clock().now();
    MUSTER_TRY(probe.begin(0, step));
    MUSTER_TRY(probe.drive(setting.deadline));
    longest = std::max(longest, seconds_since(begin));
    forgotten = server.descriptors() <= descriptors;
  }
  return {};
}

Result<Figures> measure_killed(const Setting& setting) {
  MUSTER_ASSIGN(Fleet probe, Fleet::create(!setting.echo));
  MUSTER_TRY(probe.connect(setting.server, 1, setting.deadline));
  const ServerProcess server(setting.pid);
  const size_t descriptors = server.descriptors();
  int ends[2];
  if (pipe(ends) != 0) return fail_errno(errno, "cannot make a pipe");
  const Fd reading(ends[0]);
  Fd writing(ends[1]);
  const pid_t child = fork();
  if (child < 0) return fail_errno(errno, "cannot fork");
  if (child == 0) wait_to_be_killed(setting, writing);
  writing.reset();
  char byte = 0;
  const bool ready = read(reading.get(), &byte, 1) == 1;
  const double cpu = server.cpu_seconds();
  const TimePoint begin = steady_clock().now();
  kill(child, SIGKILL);
  double longest = 0;
  const Result<> probed = ready ? probe_until(setting, probe, descriptors, longest) : Result<>{};
  const double time = seconds_since(begin);
  const double spent = server.cpu_seconds() - cpu;
  waitpid(child, nullptr, 0);
  if (!ready) return fail(ErrorCode::kPeerLost, "the process with the waiting clients failed");
  MUSTER_TRY(probed);
  return Figures{{"time", time}, {"cpu", spent}, {"longest", longest}};
}

EchoPlan killed_floor(const Setting&) {
  const Step step = ping();
  return {.turns = {{step.request.size(), step.reply_bytes}}};
}

}  // namespace

std::vector<Case> crowds() {
  return {{"barrier", "BARRIER of all clients", measure_barrier, barrier_floor},
          {"release", "one SET releases the WAIT of every client", measure_release, release_floor},
          {"killed", "a process with all clients, each in a WAIT, is killed", measure_killed, killed_floor}};
}

}  // namespace muster::load
