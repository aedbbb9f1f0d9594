#include "muster/cli/commands.h"

#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <map>

#include "muster/cli/store/store_serve.h"
#include "muster/cli/store/store_show.h"
#include "muster/launch/failure.h"
#include "muster/launch/options/command_line.h"
#include "muster/launch/options/option_values.h"
#include "muster/store/store.h"

namespace muster {
namespace {

constexpr const char* kDefaultListen = "127.0.0.1:29400";
constexpr Duration kNoticeDelay = std::chrono::seconds(3);      // of waiting for a store, until the user is notified
constexpr double kMaxSeconds = 1e9;                             // seconds: 30 years
constexpr Duration kRecheckInterval = std::chrono::seconds(1);  // for a key that may be deleted meanwhile

// The options of all commands.
struct StoreArgs {
  std::string store, secret_file, key, value, file, prefix;
  double timeout = 30, interval = 1;
  int64_t amount = 1, count = 0;
  bool json = false, wait = false, values = false;
  ServeOptions serve;
};

Duration seconds(double count) { return Duration(static_cast<int64_t>(count * 1e9)); }

Result<Bytes> secret(const StoreArgs& args) {
  const char* given = std::getenv("MUSTER_SECRET");
  return read_secret(args.secret_file, given == nullptr ? "" : given);
}

Result<std::unique_ptr<Store>> open_by(const StoreArgs& args, const Deadline& deadline) {
  MUSTER_ASSIGN(const Bytes key, secret(args));
  if (!args.store.empty()) return open_store(args.store, key, deadline);
  if (std::getenv("MUSTER_STORE") != nullptr) return store_from_environment(deadline);
  auto found = open_store(std::string("tcp://") + kDefaultListen, key, deadline);
  if (!found) found.error().message += "; --store URL names another, and `muster store serve` serves one there";
  return found;
}

// Notifies a user who waits for a store that does not run yet. A store that never answers is kUnavailable, because
// kTimeout is only for the operations.
Result<std::unique_ptr<Store>> open(const StoreArgs& args, const Deadline& deadline) {
  auto found = open_by(args, deadline.or_sooner(deadline.clock().now() + kNoticeDelay));
  const auto silent = [&] { return !found && found.error().code == ErrorCode::kTimeout; };
  if (silent() && !deadline.passed()) {
    std::fprintf(stderr, "muster store: %s; waiting for it (--timeout %g)\n", found.error().message.c_str(),
                 args.timeout);
    found = open_by(args, deadline);
  }
  if (silent()) found.error().code = ErrorCode::kUnavailable;
  return found;
}

Result<> write_out(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return {};
  return fail_errno(errno, "cannot write to standard output");
}

tl::unexpected<Error> no_such_key(const Key& key, const char* hint = "") {
  return fail(ErrorCode::kNotFound, "no such key: \"" + printable(key) + "\"" + hint);
}

Result<> get(const StoreArgs& args, Store& store, const Deadline& deadline) {
  if (!args.wait) {
    MUSTER_ASSIGN(const bool there, store.check({args.key}, deadline));
    if (!there) return no_such_key(args.key, " (--wait waits for it)");
  }
  MUSTER_ASSIGN(const Bytes value, store.get(args.key, deadline));
  if (args.json) return write_out(as_json({args.key, &value}) + "\n");
  // Prints the exact value. A terminal also gets an end of line.
  return write_out(to_string(value) + (::isatty(STDOUT_FILENO) == 1 ? "\n" : ""));
}

Result<> set(const StoreArgs& args, Store& store, const Deadline& deadline) {
  std::string value = args.value;
  if (!args.file.empty()) {
    std::ifstream file;
    if (args.file != "-") file.open(args.file, std::ios::binary);
    std::istream& in = args.file == "-" ? std::cin : file;
    if (!in) return fail(ErrorCode::kInvalidArgument, "--file " + args.file + ": the file cannot be read");
    value.assign(std::istreambuf_iterator<char>(in), {});
  }
  return store.set(args.key, as_bytes(value), deadline);
}

Result<> add(const StoreArgs& args, Store& store, const Deadline& deadline) {
  MUSTER_ASSIGN(const int64_t sum, store.add(args.key, args.amount, deadline));
  return write_out(std::to_string(sum) + "\n");
}

Result<> remove(const StoreArgs& args, Store& store, const Deadline& deadline) {
  MUSTER_ASSIGN(const bool was_there, store.delete_key(args.key, deadline));
  if (was_there) return {};
  return no_such_key(args.key);
}

Result<> barrier(const StoreArgs& args, Store& store, const Deadline& deadline) {
  return store.barrier(args.key, args.count, deadline);
}

// The keys with this prefix and their values. A key that is deleted meanwhile is left out.
Result<std::map<Key, Bytes>> contents(Store& store, const std::string& prefix, const Deadline& deadline) {
  MUSTER_ASSIGN(const auto keys, store.list_keys(prefix, deadline));
  std::map<Key, Bytes> found;
  for (const Key& key : keys) {
    while (true) {
      MUSTER_ASSIGN(const bool there, store.check({key}, deadline));
      if (!there) break;
      auto value = store.get(key, deadline.or_sooner(deadline.clock().now() + kRecheckInterval));
      if (value) found[key] = std::move(*value);
      if (value) break;
      if (value.error().code != ErrorCode::kTimeout || deadline.passed()) return tl::unexpected(value.error());
    }
  }
  return found;
}

std::string line(const StoreArgs& args, const ShownKey& shown) {
  return (args.json ? as_json(shown) : as_text(shown)) + "\n";
}

Result<> list(const StoreArgs& args, Store& store, const Deadline& deadline) {
  std::string out;
  if (args.values) {
    MUSTER_ASSIGN(const auto found, contents(store, args.prefix, deadline));
    for (const auto& [key, value] : found) out += line(args, {key, &value});
  } else {
    MUSTER_ASSIGN(const auto keys, store.list_keys(args.prefix, deadline));
    for (const Key& key : keys) out += line(args, {key});
  }
  return write_out(out);
}

// Polls every `interval`, so a key that is set and deleted in between is not seen. Ends after `count` changes.
Result<> watch(const StoreArgs& args, Store& store, const Deadline&) {
  int64_t seen = 0;
  std::map<Key, Bytes> before;
  while (true) {
    MUSTER_ASSIGN(auto now, contents(store, args.prefix, Deadline::after(seconds(args.timeout))));
    std::vector<ShownKey> changes;
    for (const auto& [key, value] : now) {
      const auto old = before.find(key);
      if (old == before.end()) changes.push_back({key, &value, "set"});
      if (old != before.end() && old->second != value) changes.push_back({key, &value, "changed"});
    }
    for (const auto& [key, value] : before)
      if (!now.contains(key)) changes.push_back({key, nullptr, "deleted"});
    for (const ShownKey& change : changes) {
      MUSTER_TRY(write_out(line(args, change)));
      if (++seen == args.count) return {};
    }
    before = std::move(now);
    ::poll(nullptr, 0, Deadline::after(seconds(args.interval)).poll_timeout_ms());
  }
}

Result<> stat(const StoreArgs& args, Store& store, const Deadline& deadline) {
  MUSTER_ASSIGN(const StoreStat found, store.stat(deadline));
  return write_out(args.json ? as_json(found) + "\n" : as_text(found));
}

using Run = Result<> (*)(const StoreArgs&, Store&, const Deadline&);

struct CommandLine {
  CLI::App app{"Serves a key-value store, or reads and writes one.", "muster store"};
  StoreArgs args;
  std::map<const CLI::App*, Run> commands;
  CLI::App* serve = nullptr;

  CommandLine() {
    app.require_subcommand(0, 1);
    app.fallthrough();
    app.add_option("--store", args.store, "the store; the default is the job's (MUSTER_STORE) or tcp://127.0.0.1:29400")
        ->type_name("URL");
    app.add_option("--secret-file", args.secret_file, "a file with the secret in hex; the default is MUSTER_SECRET")
        ->type_name("FILE");
    app.add_option("--timeout", args.timeout, "how long to wait for the store, and for keys and barriers")
        ->check(number_between(0, kMaxSeconds, "a number of seconds from 0 up"))
        ->type_name("SECONDS")
        ->capture_default_str();
    add_serve();
    auto* get_command = add("get", "print the exact value of a key", get);
    get_command->add_flag("--wait", args.wait, "wait until the key exists");
    with_key(with_json(get_command));
    auto* set_command = with_key(add("set", "set a key", set));
    auto* value = set_command->add_option("value", args.value, "its value");
    auto* file = set_command->add_option("--file", args.file, "take the value from this file; -: from standard input");
    file->excludes(value);
    set_command->callback([value, file] {
      if (value->empty() && file->empty()) throw CLI::RequiredError("a value, or --file,");
    });
    with_key(add("add", "add to a counter and print the sum", muster::add))
        ->add_option("amount", args.amount, "by default 1");
    with_key(add("delete", "delete a key", remove));
    with_key(add("barrier", "wait until `count` processes have come to the same barrier", barrier))
        ->add_option("count", args.count, "number of processes")
        ->required();
    auto* ls = with_prefix(with_json(add("ls", "list the keys", list)));
    ls->add_flag("-l,--values", args.values, "print also their values");
    auto* watch_command = with_prefix(with_json(add("watch", "print changes until interrupted", watch)));
    watch_command->add_option("--interval", args.interval, "seconds between two reads")
        ->check(number_between(1e-3, kMaxSeconds, "a number of seconds from 0.001 up"))
        ->capture_default_str();
    watch_command->add_option("--count", args.count, "end after this many changes")
        ->check(number_between(1, 9e18, "a number from 1 up"));
    with_json(add("stat", "print the counters of a store server", stat));
  }

 private:
  CLI::App* add(const char* name, const char* summary, Run run) {
    CLI::App* command = app.add_subcommand(name, summary);
    commands[command] = run;
    return command;
  }
  CLI::App* with_key(CLI::App* command) {
    command->add_option("key", args.key, "the key")->required();
    return command;
  }
  CLI::App* with_prefix(CLI::App* command) {
    command->add_option("prefix", args.prefix, "only keys with this prefix");
    return command;
  }
  CLI::App* with_json(CLI::App* command) {
    command->add_flag("--json", args.json, "print one JSON object per line");
    return command;
  }
  void add_serve() {
    serve = app.add_subcommand("serve", "serve a store until SIGINT or SIGTERM");
    serve->add_option("--listen", args.serve.listen, "host:port, unix:/path or unix:@name; port 0 takes a free one")
        ->default_str(kDefaultListen);
    serve->add_option("--torch-listen", args.serve.torch_listen, "host:port for torch.distributed.TCPStore clients");
    serve->add_option("--threads", args.serve.server.threads,
                      "number of threads; the default is one per two cores, at most 16, and one for a proxy");
    auto* upstream =
        serve->add_option("--upstream", args.serve.server.upstream, "run a proxy of the store server at this URL");
    serve
        ->add_flag("--tiered", args.serve.server.tiered,
                   "as a proxy: merge adds and barriers, and answer reads from leases")
        ->needs(upstream);
  }
};

int status_of(ErrorCode code) {
  if (code == ErrorCode::kNotFound || code == ErrorCode::kTimeout) return 1;
  return code == ErrorCode::kInvalidArgument ? 2 : 3;
}

Result<> run(CommandLine& command_line) {
  StoreArgs& args = command_line.args;
  if (command_line.serve->parsed()) {
    if (args.serve.listen.empty()) args.serve.listen = {kDefaultListen};
    MUSTER_ASSIGN(args.serve.server.credentials.secret, secret(args));
    return serve_store(args.serve);
  }
  const Deadline deadline = Deadline::after(seconds(args.timeout));
  MUSTER_ASSIGN(const auto store, open(args, deadline));
  return command_line.commands.at(command_line.app.get_subcommands().front())(args, *store, deadline);
}

}  // namespace

int store_command(const std::string&, const std::vector<std::string>& args) {
  CommandLine command_line;
  if (const auto end = parse_command_line(command_line.app, args)) return *end;
  if (command_line.app.get_subcommands().empty())
    return print_error("store",
                       "no command was given: serve, get, set, ls, watch, stat, ... (see `muster store --help`)", 2);
  const Result<> done = run(command_line);
  if (done) return 0;
  const std::string command = "store " + command_line.app.get_subcommands().front()->get_name();
  return print_error(command, done.error().message, status_of(done.error().code));
}

std::vector<CommandSyntax> store_subcommands() {
  CommandLine command_line;
  const auto options = [&](const CLI::App& app) {
    std::vector<std::string> names;
    for (const auto* option : app.get_options())
      for (const auto& name : option->get_lnames())
        if (name != "help") names.push_back("--" + name);
    return names;
  };
  std::vector<CommandSyntax> all;
  for (const auto* command : command_line.app.get_subcommands(nullptr)) {
    all.push_back({command->get_name(), command->get_description(), {}, options(*command)});
    for (auto& name : options(command_line.app)) all.back().options.push_back(std::move(name));
  }
  return all;
}

}  // namespace muster
