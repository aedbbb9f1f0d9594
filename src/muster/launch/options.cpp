#include "muster/launch/options.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "muster/io/address.h"
#include "muster/io/handshake.h"

namespace muster {
namespace {

constexpr uint16_t kDefaultPort = 29500;
constexpr int kMaxNodes = 1 << 20;
constexpr int kMaxWorkers = 1 << 16;

// The options as text, before any of them is understood.
struct Raw {
  std::string nnodes = "1", nproc = "1", node_rank, master_addr, master_port, local_addr, rdzv_backend = "static",
              rdzv_endpoint, rdzv_id, max_restarts = "0", role = "default", log_dir, secret_file, timeout = "300",
              shutdown_timeout = "5";
  bool standalone = false, no_python = false, module = false, help = false;
};

struct Valued {
  const char* names;
  const char* takes;
  const char* description;
  std::string Raw::*value;
};
constexpr Valued kValued[] = {
    {"--nnodes", "N", "number of nodes (hosts) in the job", &Raw::nnodes},
    {"--nproc-per-node", "N|auto|cpu|gpu", "workers on this node; auto: one per GPU, or per CPU where there is none",
     &Raw::nproc},
    {"--node-rank", "N", "this node's number, 0 to nnodes - 1; by order of arrival when not given", &Raw::node_rank},
    {"--master-addr", "HOST", "host of node 0, where the job's store listens", &Raw::master_addr},
    {"--master-port", "PORT", "its port (29500 when there are several nodes; one node: any free one)",
     &Raw::master_port},
    {"--local-addr,--interface", "ADDRESS|INTERFACE", "this node's address or interface to use", &Raw::local_addr},
    {"--rdzv-backend", "static|c10d|parallel", "taken from torchrun; all mean the job's own store", &Raw::rdzv_backend},
    {"--rdzv-endpoint", "HOST[:PORT]", "the same as --master-addr and --master-port", &Raw::rdzv_endpoint},
    {"--rdzv-id", "NAME", "the job's name, the same on all nodes", &Raw::rdzv_id},
    {"--max-restarts", "N", "restarts after a failure: not there yet", &Raw::max_restarts},
    {"--role", "NAME", "the workers' role (ROLE_NAME)", &Raw::role},
    {"--log-dir", "FOLDER", "also write each worker's output to files there", &Raw::log_dir},
    {"--secret-file", "FILE", "the job's secret in hex, the same on all nodes (or the variable MUSTER_SECRET)",
     &Raw::secret_file},
    {"--timeout", "SECONDS", "for all nodes to arrive", &Raw::timeout},
    {"--shutdown-timeout", "SECONDS", "between SIGTERM and SIGKILL when the job is stopped", &Raw::shutdown_timeout},
};

struct Flag {
  const char* names;
  const char* description;
  bool Raw::*value;
};
constexpr Flag kFlags[] = {
    {"--standalone", "a job on this node alone", &Raw::standalone},
    {"--no-python", "run the program itself, not under Python", &Raw::no_python},
    {"-m,--module", "run a Python module: python -m", &Raw::module},
    {"-h,--help", "show this", &Raw::help},
};

std::unique_ptr<CLI::App> make_app(Raw& raw) {
  auto app = std::make_unique<CLI::App>(
      "Starts the workers of a distributed job on this node: one process per rank, with torchrun's environment.\n"
      "Options end at the script; what follows belongs to it.",
      "muster run");
  app->set_help_flag();
  for (const auto& o : kValued) {
    auto* option = app->add_option(o.names, raw.*o.value, o.description)->type_name(o.takes);
    if (!(raw.*o.value).empty()) option->default_str(raw.*o.value);
  }
  for (const auto& o : kFlags) app->add_flag(o.names, raw.*o.value, o.description);
  return app;
}

tl::unexpected<Error> bad(std::string message) { return fail(ErrorCode::kInvalidArgument, std::move(message)); }

template <class Number>
std::optional<Number> to_number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// "--nproc_per_node=4" -> {"--nproc-per-node", "=4"}.
std::pair<std::string, std::string> split_word(const std::string& word) {
  const size_t equals = std::min(word.find('='), word.size());
  std::string name = word.substr(0, equals);
  if (name.starts_with("--")) std::replace(name.begin(), name.end(), '_', '-');
  return {name, word.substr(equals)};
}

tl::unexpected<Error> unknown_option(const CLI::App& app, const std::string& name) {
  std::string hint;
  for (const auto* option : app.get_options()) {
    const std::string known = "--" + (option->get_lnames().empty() ? "" : option->get_lnames().front());
    if (name.size() > 4 && known.starts_with(name)) hint += (hint.empty() ? "; did you mean " : " or ") + known;
  }
  return bad(fmt::format("unknown option {}{}", name, hint));
}

struct Split {
  std::vector<std::string> options, rest;
};

// Cuts the words where the options end, and spells the options with dashes.
Result<Split> split_words(const CLI::App& app, const std::vector<std::string>& words) {
  Split split;
  size_t i = 0;
  for (; i < words.size() && words[i].size() > 1 && words[i][0] == '-'; ++i) {
    if (words[i] == "--") {
      ++i;
      break;
    }
    const auto [name, value] = split_word(words[i]);
    const auto* option = app.get_option_no_throw(name);
    if (option == nullptr) return unknown_option(app, name);
    split.options.push_back(name + value);
    const bool takes_value = option->get_expected_max() > 0;
    if (!takes_value && !value.empty()) return bad(fmt::format("{} takes no value, not '{}'", name, value.substr(1)));
    if (!takes_value) continue;
    if (value.empty() && i + 1 < words.size()) split.options.back() += "=" + words[++i];
    if (split.options.back().size() <= name.size() + 1)
      return bad(fmt::format("{} takes {}, and nothing was given", name, option->get_type_name()));
  }
  split.rest.assign(words.begin() + static_cast<std::ptrdiff_t>(i), words.end());
  return split;
}

// torchrun reads PET_NNODES and so on; a cluster's operator may set them. They come first, so that options win.
void prepend_environment(const Environment& environment, std::vector<std::string>& options) {
  std::vector<std::string> first;
  for (const auto& o : kValued) {
    const std::string name = std::string(o.names).substr(0, std::string_view(o.names).find(','));
    std::string variable = "PET_" + name.substr(2);
    std::transform(variable.begin(), variable.end(), variable.begin(),
                   [](char c) { return c == '-' ? '_' : static_cast<char>(std::toupper(c)); });
    const bool given = std::any_of(options.begin(), options.end(),
                                   [&](const std::string& option) { return option.starts_with(name + "="); });
    const auto found = environment.find(variable);
    if (!given && found != environment.end() && !found->second.empty()) first.push_back(name + "=" + found->second);
  }
  options.insert(options.begin(), first.begin(), first.end());
}

Result<int> parse_int(const char* option, const std::string& text, int low, int high, const char* takes) {
  const auto value = to_number<int>(text);
  if (!value || *value < low || *value > high) return bad(fmt::format("{} takes {}, not '{}'", option, takes, text));
  return *value;
}

Result<int> parse_nnodes(const std::string& text) {
  // torchrun's "MIN:MAX" is fine while both are the same.
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return parse_int("--nnodes", text, 1, kMaxNodes, "a number of nodes from 1 up");
  if (text.substr(0, colon) == text.substr(colon + 1)) return parse_nnodes(text.substr(0, colon));
  return bad(fmt::format("--nnodes takes a fixed number of nodes, not '{}': elastic ranges are not there yet", text));
}

Result<int> parse_nproc(const std::string& text, const Machine& machine) {
  if (text == "cpu") return machine.cpus;
  if (text == "auto") return machine.gpus > 0 ? machine.gpus : machine.cpus;
  if (text == "gpu") {
    if (machine.gpus > 0) return machine.gpus;
    return bad("--nproc-per-node gpu: this machine shows no GPU; give a number, or cpu");
  }
  return parse_int("--nproc-per-node", text, 1, kMaxWorkers, "auto, cpu, gpu or a number from 1 up");
}

Result<Duration> parse_seconds(const char* option, const std::string& text) {
  double seconds = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() || !(seconds >= 0) || seconds > 1e8)
    return bad(fmt::format("{} takes a number of seconds, not '{}'", option, text));
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

Result<Bytes> parse_secret(const Raw& raw, const Environment& environment) {
  std::string source = "MUSTER_SECRET";
  std::string text;
  if (!raw.secret_file.empty()) {
    source = "--secret-file " + raw.secret_file;
    std::ifstream file(raw.secret_file);
    if (!file) return bad(fmt::format("{}: the file cannot be read", source));
    file >> text;
    if (text.empty()) return bad(fmt::format("{}: the file is empty; it takes the job's secret in hex", source));
  } else if (const auto found = environment.find("MUSTER_SECRET"); found != environment.end()) {
    text = found->second;
  }
  auto secret = from_hex(text);
  if (!secret) return bad(source + " takes the job's secret in hex, and this is something else");
  return secret;
}

Result<> read_endpoint(const Raw& raw, RunOptions& options) {
  options.master_addr = raw.master_addr;
  std::string port = raw.master_port;
  if (!raw.rdzv_endpoint.empty() && raw.master_addr.empty()) {
    const auto endpoint = parse_host_port(raw.rdzv_endpoint, 0);
    if (!endpoint) return bad("--rdzv-endpoint takes HOST[:PORT], not '" + raw.rdzv_endpoint + "'");
    options.master_addr = endpoint->host;
    if (port.empty() && endpoint->port != 0) port = std::to_string(endpoint->port);
  }
  if (port.empty()) {
    options.master_port = options.nnodes > 1 ? kDefaultPort : 0;
    return {};
  }
  MUSTER_ASSIGN(const int number, parse_int("--master-port", port, 0, 65535, "a port from 0 to 65535"));
  options.master_port = static_cast<uint16_t>(number);
  if (number == 0 && options.nnodes > 1) return bad("--master-port 0: several nodes need a port that all of them know");
  return {};
}

Result<> read_nodes(const Raw& raw, RunOptions& options) {
  MUSTER_ASSIGN(options.nnodes, parse_nnodes(raw.nnodes));
  if (raw.standalone && options.nnodes > 1)
    return bad("--standalone is for one node, and --nnodes asks for " + raw.nnodes);
  if (!raw.node_rank.empty()) {
    const std::string takes = fmt::format("a number from 0 to {} (--nnodes {})", options.nnodes - 1, options.nnodes);
    MUSTER_ASSIGN(options.node_rank, parse_int("--node-rank", raw.node_rank, 0, options.nnodes - 1, takes.c_str()));
  }
  if (raw.rdzv_backend != "static" && raw.rdzv_backend != "c10d" && raw.rdzv_backend != "parallel")
    return bad(fmt::format("--rdzv-backend takes static, c10d or parallel, not '{}'", raw.rdzv_backend));
  MUSTER_TRY(read_endpoint(raw, options));
  if (options.nnodes > 1 && options.master_addr.empty())
    return bad(fmt::format("--nnodes {} needs --master-addr: the host of node 0", options.nnodes));
  return {};
}

Result<> read_target(const Raw& raw, const std::vector<std::string>& rest, RunOptions& options) {
  if (raw.module && raw.no_python) return bad("--module and --no-python exclude each other");
  if (raw.module) options.target = RunOptions::Target::kModule;
  if (raw.no_python) options.target = RunOptions::Target::kProgram;
  if (rest.empty() && raw.module) return bad("no module was given: muster run [options] -m module [its arguments]");
  if (rest.empty() && raw.no_python)
    return bad("no program was given: muster run [options] --no-python program [its arguments]");
  if (rest.empty()) return bad("no script was given: muster run [options] script.py [its arguments]");
  options.program = rest.front();
  options.arguments.assign(rest.begin() + 1, rest.end());
  return {};
}

Result<RunOptions> understand(const Raw& raw, const std::vector<std::string>& rest, const Environment& environment,
                              const Machine& machine) {
  RunOptions options;
  options.help = raw.help;
  if (raw.help) return options;
  MUSTER_TRY(read_nodes(raw, options));
  MUSTER_ASSIGN(options.nproc, parse_nproc(raw.nproc, machine));
  if (raw.max_restarts != "0")
    return bad(fmt::format("--max-restarts takes 0, not '{}': restarts are not there yet", raw.max_restarts));
  MUSTER_ASSIGN(options.timeout, parse_seconds("--timeout", raw.timeout));
  MUSTER_ASSIGN(options.shutdown_timeout, parse_seconds("--shutdown-timeout", raw.shutdown_timeout));
  MUSTER_ASSIGN(options.secret, parse_secret(raw, environment));
  MUSTER_TRY(read_target(raw, rest, options));
  options.local_addr = raw.local_addr;
  options.role = raw.role;
  options.log_dir = raw.log_dir;
  options.run_id = raw.rdzv_id;
  // Several nodes must agree on the name; "none" is torchrun's.
  if (options.run_id.empty()) {
    Bytes random = generate_secret();
    options.run_id = options.nnodes > 1 ? "none" : to_hex(ByteView(random).first(8));
  }
  return options;
}

}  // namespace

Environment current_environment() {
  Environment environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string_view::npos) environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return environment;
}

Machine this_machine() {
  Machine machine;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) machine.cpus = std::max(1, CPU_COUNT(&set));
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", ignored)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("nvidia") && to_number<int>(std::string_view(name).substr(6))) ++machine.gpus;
  }
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    const std::string_view list = visible;
    const auto named = list.empty() ? 0 : 1 + std::count(list.begin(), list.end(), ',');
    machine.gpus = std::min(machine.gpus, static_cast<int>(named));
  }
  return machine;
}

Result<RunOptions> parse_run_options(const std::vector<std::string>& arguments, const Environment& environment,
                                     const Machine& machine) {
  Raw raw;
  const auto app = make_app(raw);
  MUSTER_ASSIGN(Split split, split_words(*app, arguments));
  prepend_environment(environment, split.options);
  // CLI11 reports by exception; nothing in the core does.
  try {
    std::reverse(split.options.begin(), split.options.end());
    app->parse(split.options);
  } catch (const CLI::Error& error) {
    return bad(error.what());
  }
  return understand(raw, split.rest, environment, machine);
}

std::string run_help() {
  Raw raw;
  auto app = make_app(raw);
  app->get_formatter()->column_width(42);
  app->footer(
      "Workers get torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, ...). Unless it is "
      "set,\n"
      "OMP_NUM_THREADS is this node's CPUs divided by its workers. MUSTER_PYTHON names another Python for the "
      "workers.");
  std::string help = app->help();
  constexpr std::string_view kUsage = "[OPTIONS]";
  if (const size_t at = help.find(kUsage); at != std::string::npos)
    help.replace(at, kUsage.size(), "[options] script.py [arguments of the script]");
  return help;
}

}  // namespace muster
