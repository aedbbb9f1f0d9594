#include "muster/cli/commands.h"
#include "muster/cli/warm_attach.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <filesystem>
#include <map>
#include <sstream>

#include "muster/base/clock.h"
#include "muster/launch/command.h"
#include "muster/launch/failure.h"
#include "muster/launch/options/command_line.h"
#include "muster/launch/options/option_values.h"
#include "muster/launch/private_directories.h"
#include "muster/launch/process_tree.h"
#include "muster/launch/workers/warm.h"
#include "muster/launch/workers/zygote_program.h"

namespace muster {
namespace {

constexpr Duration kImportTime = std::chrono::minutes(5);  // for all imports
constexpr Duration kAnswerTime = std::chrono::seconds(5);

struct WarmOptions {
  std::string action = "start";
  std::vector<std::string> preload;
  double idle = 1800;
};

using Facts = std::map<std::string, std::string>;

// Asks the zygote that listens at `path`. kUnavailable if it does not answer in time.
Result<Facts> ask(const std::string& path, const char* question, Duration patience) {
  MUSTER_ASSIGN(const Fd socket, connect_warm(path));
  MUSTER_TRY(send_message(socket.get(), question));
  pollfd entry{socket.get(), POLLIN, 0};
  if (::poll(&entry, 1, static_cast<int>(patience / std::chrono::milliseconds(1))) <= 0)
    return fail(ErrorCode::kUnavailable, "the zygote at " + path + " does not answer");
  MUSTER_ASSIGN(const std::string text, receive_message(socket.get()));
  Facts facts;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t space = std::min(line.find(' '), line.size());
    facts[line.substr(0, space)] = line.substr(std::min(space + 1, line.size()));
  }
  return facts;
}

std::string describe(const Facts& facts) {
  const auto fact = [&](const char* name) { return value_of(facts, name); };
  const std::string preload = fact("preload").empty() ? "" : " and " + fact("preload");
  const bool idle = fact("runs") == "0";
  return fmt::format("pid {}: {} with torch{}; {} run{} now, {} in total, ends {}", fact("pid"), fact("python"),
                     preload, fact("runs"), fact("runs") == "1" ? "" : "s", fact("served"),
                     idle ? "after " + fact("left") + " s without one" : "some time after them");
}

std::vector<std::string> sockets(const std::string& directory) {
  std::vector<std::string> paths;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored))
    if (entry.path().filename().string().starts_with("warm-") && entry.is_socket(ignored))
      paths.push_back(entry.path());
  return paths;
}

Result<Fd> listen_at(const std::string& path) {
  MUSTER_ASSIGN(const Address address, socket_at(path));
  ::unlink(path.c_str());
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket || ::bind(socket.get(), address.raw(), address.raw_length()) != 0 || ::listen(socket.get(), 64) != 0)
    return fail_errno(errno, "cannot listen at " + path);
  return socket;
}

// Stops the zygotes with the same Python and the same preloaded modules, because the new one replaces them.
void stop_replaced(const std::string& directory, const std::string& python, const std::string& preload) {
  for (const auto& path : sockets(directory)) {
    const auto facts = ask(path, "status", kAnswerTime);
    if (facts && facts->at("python") == python && facts->at("preload") == preload) (void)ask(path, "stop", kAnswerTime);
  }
}

int start(const std::string& own_path, const WarmOptions& options) {
  const Environment environment = current_environment();
  const auto python = find_python(own_path, environment);
  if (!python) return print_error("warm", python.error().message, 127);
  // Only one process at a time continues here, so that a second one finds the zygote of the first one.
  const auto lock = lock_user_directory(environment);
  if (!lock) return print_error("warm", lock.error().message, 1);
  const WarmKey key{*python, options.preload, environment};
  const std::string path = warm_path(key).value_or("");
  if (const auto facts = ask(path, "status", kAnswerTime)) {
    std::printf("muster: warm already: %s\n", describe(*facts).c_str());
    return 0;
  }
  stop_replaced(std::filesystem::path(path).parent_path(), *python, fmt::format("{}", fmt::join(options.preload, ",")));
  const auto listener = listen_at(path);
  if (!listener) return print_error("warm", listener.error().message, 1);
  const Fd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  struct stat socket {};
  if (::lstat(path.c_str(), &socket) != 0) return print_error("warm", path + " was removed at once", 1);
  ZygoteStart zygote{*python,     {"warm", fmt::format("{}", options.idle), std::to_string(socket.st_ino)},
                     environment, listener->get(),
                     null.get(),  true};
  zygote.args.insert(zygote.args.end(), options.preload.begin(), options.preload.end());
  if (const auto started = start_zygote(zygote); !started) return print_error("warm", started.error().message, 1);
  const auto facts = ask(path, "status", kImportTime);
  const std::string failure = facts ? facts->at("failure") : facts.error().message;
  if (failure.empty()) return std::printf("muster: warm: %s\n", describe(*facts).c_str()) < 0;
  ::unlink(path.c_str());
  return print_error("warm", failure, 1);
}

// Waits for the end of a zygote without runs, which ends at once. Others end after their last run.
void await_end(const Facts& facts) {
  if (facts.at("runs") != "0") return;
  (void)has_ended(open_process(to_number<pid_t>(facts.at("pid")).value_or(0)), kAnswerTime);
}

int show(bool stop) {
  const auto directory = user_directory(current_environment(), /*create=*/false);
  if (!directory) return print_error("warm", directory.error().message, 1);
  int found = 0;
  for (const auto& path : sockets(*directory)) {
    const auto facts = ask(path, stop ? "stop" : "status", kAnswerTime);
    if (!facts) continue;
    ++found;
    if (stop) await_end(*facts);
    std::printf("%s%s\n", stop ? "stopped " : "", describe(*facts).c_str());
  }
  if (found == 0) std::puts("no zygote is kept warm");
  return found == 0 && !stop ? 1 : 0;
}

}  // namespace

int warm_command(const std::string& own_path, const std::vector<std::string>& args) {
  if (!args.empty() && args.front() == "attach") return attach_to_warm(own_path, {args.begin() + 1, args.end()});
  WarmOptions options;
  CLI::App app("Keeps a Python that has imported torch between runs, so that the next `muster run` starts at once.",
               "muster warm");
  app.add_option("ACTION", options.action, "what to do; the default is start")
      ->check(CLI::IsMember({"start", "status", "stop"}).description(""))
      ->type_name("start|status|stop");
  app.add_option("--preload", options.preload, "modules to import besides torch")
      ->delimiter(',')
      ->type_name("MODULE,...");
  app.add_option("--idle", options.idle, "how long it waits for a run until it ends")
      ->type_name("SECONDS")
      ->check(number_between(0.1, 1e7, "a number of seconds from 0.1 up"))
      ->capture_default_str();
  if (const auto end = parse_command_line(app, args)) return *end;
  const int status = options.action == "start" ? start(own_path, options) : show(options.action == "stop");
  // After an error, or if the last zygote was stopped, there may be nothing left in the directory.
  if (const auto directory = user_directory(current_environment(), /*create=*/false)) remove_user_directory(*directory);
  return status;
}

}  // namespace muster
