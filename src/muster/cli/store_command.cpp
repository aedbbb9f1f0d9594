#include "muster/cli/store_command.h"

#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <map>
#include <optional>

#include "muster/cli/store_serve.h"
#include "muster/cli/store_show.h"
#include "muster/launch/options/command_line.h"
#include "muster/launch/options/option_values.h"
#include "muster/store/store.h"

namespace muster {
namespace {

constexpr const char* kDefaultListen = "127.0.0.1:29400";
constexpr Duration kQuietTime = std::chrono::seconds(3);  // of waiting for a store, before the user is told
constexpr double kLongest = 1e9;                          // seconds of a wait: 30 years
constexpr Duration kLook = std::chrono::seconds(1);       // at a key that may be deleted meanwhile

// What the command line says, for all of the commands.
struct StoreWords {
  std::string store, secret_file, key, value, file, prefix;
  double timeout = 30, interval = 1;
  int64_t amount = 1, count = 0;
  bool json = false, wait = false, values = false;
  ServeOptions serve;
};

Result<Bytes> secret(const StoreWords& words) {
  const char* given = std::getenv("MUSTER_SECRET");
  return read_secret(words.secret_file, given == nullptr ? "" : given);
}

Result<std::unique_ptr<Store>> open_by(const StoreWords& words, const Deadline& deadline) {
  MUSTER_ASSIGN(const Bytes key, secret(words));
  if (!words.store.empty()) return open_store(words.store, key, deadline);
  if (std::getenv("MUSTER_STORE") != nullptr) return store_from_environment(deadline);
  auto found = open_store(std::string("tcp://") + kDefaultListen, key, deadline);
  if (!found) found.error().message += "; --store URL names another, and `muster store serve` serves one there";
  return found;
}

// Who waits for a store that is still to come is told so. One that did not come is unavailable: a timeout is for what
// it was asked.
Result<std::unique_ptr<Store>> open(const StoreWords& words, const Deadline& deadline) {
  auto found = open_by(words, deadline.or_sooner(deadline.clock().now() + kQuietTime));
  const auto silent = [&] { return !found && found.error().code == ErrorCode::kTimeout; };
  if (silent() && !deadline.passed()) {
    std::fprintf(stderr, "muster store: %s; waiting for it (--timeout %g)\n", found.error().message.c_str(),
                 words.timeout);
    found = open_by(words, deadline);
  }
  if (silent()) found.error().code = ErrorCode::kUnavailable;
  return found;
}

Result<> write_out(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return {};
  return fail_errno(errno, "cannot write to standard output");
}

tl::unexpected<Error> absent(const Key& key, const char* hint = "") {
  return fail(ErrorCode::kNotFound, "there is no key \"" + printable(key) + "\"" + hint);
}

Result<> get(const StoreWords& words, Store& store, const Deadline& deadline) {
  if (!words.wait) {
    MUSTER_ASSIGN(const bool there, store.check({words.key}, deadline));
    if (!there) return absent(words.key, " (--wait waits for it)");
  }
  MUSTER_ASSIGN(const Bytes value, store.get(words.key, deadline));
  if (words.json) return write_out(as_json({words.key, &value, ""}) + "\n");
  // Exactly what is in the store; only a person gets an end of line with it.
  return write_out(to_string(value) + (::isatty(STDOUT_FILENO) == 1 ? "\n" : ""));
}

Result<> set(const StoreWords& words, Store& store, const Deadline& deadline) {
  std::string value = words.value;
  if (!words.file.empty()) {
    std::ifstream file;
    if (words.file != "-") file.open(words.file, std::ios::binary);
    std::istream& in = words.file == "-" ? std::cin : file;
    if (!in) return fail(ErrorCode::kInvalidArgument, "--file " + words.file + ": the file cannot be read");
    value.assign(std::istreambuf_iterator<char>(in), {});
  }
  return store.set(words.key, as_bytes(value), deadline);
}

Result<> add(const StoreWords& words, Store& store, const Deadline& deadline) {
  MUSTER_ASSIGN(const int64_t sum, store.add(words.key, words.amount, deadline));
  return write_out(std::to_string(sum) + "\n");
}

Result<> remove(const StoreWords& words, Store& store, const Deadline& deadline) {
  MUSTER_ASSIGN(const bool was_there, store.delete_key(words.key, deadline));
  if (was_there) return {};
  return absent(words.key);
}

Result<> barrier(const StoreWords& words, Store& store, const Deadline& deadline) {
  return store.barrier(words.key, words.count, deadline);
}

// The keys and values that begin so. One that is deleted meanwhile is left out.
Result<std::map<Key, Bytes>> contents(Store& store, const std::string& prefix, const Deadline& deadline) {
  MUSTER_ASSIGN(const auto keys, store.list_keys(prefix, deadline));
  std::map<Key, Bytes> found;
  for (const Key& key : keys) {
    while (true) {
      MUSTER_ASSIGN(const bool there, store.check({key}, deadline));
      if (!there) break;
      auto value = store.get(key, deadline.or_sooner(deadline.clock().now() + kLook));
      if (value) found[key] = std::move(*value);
      if (value) break;
      if (value.error().code != ErrorCode::kTimeout || deadline.passed()) return tl::unexpected(value.error());
    }
  }
  return found;
}

Result<> list(const StoreWords& words, Store& store, const Deadline& deadline) {
  std::string out;
  if (words.values) {
    MUSTER_ASSIGN(const auto found, contents(store, words.prefix, deadline));
    for (const auto& [key, value] : found) {
      out += words.json ? as_json({key, &value, ""}) : printable(key) + "  " + printable(to_string(value));
      out += '\n';
    }
  } else {
    MUSTER_ASSIGN(const auto keys, store.list_keys(words.prefix, deadline));
    for (const Key& key : keys) out += (words.json ? as_json({key, nullptr, ""}) : printable(key)) + "\n";
  }
  return write_out(out);
}

Result<> show_change(const StoreWords& words, const std::string& change, const Key& key, const Bytes* value) {
  if (words.json) return write_out(as_json({key, value, change}) + "\n");
  const std::string shown = value == nullptr ? "" : "  " + printable(to_string(*value));
  return write_out(change + "  " + printable(key) + shown + "\n");
}

// Looks every `interval`: what was set and deleted again in between is not seen. Until `count` changes, or for ever.
Result<> watch(const StoreWords& words, Store& store, const Deadline&) {
  const Duration interval(static_cast<int64_t>(words.interval * 1e9));
  const auto look = [&] {
    return contents(store, words.prefix, Deadline::after(Duration(static_cast<int64_t>(words.timeout * 1e9))));
  };
  int64_t seen = 0;
  std::map<Key, Bytes> before;
  while (true) {
    MUSTER_ASSIGN(auto now, look());
    for (const auto& [key, value] : now) {
      const auto old = before.find(key);
      if (old != before.end() && old->second == value) continue;
      MUSTER_TRY(show_change(words, old == before.end() ? "set" : "changed", key, &value));
      if (++seen == words.count) return {};
    }
    for (const auto& [key, value] : before) {
      if (now.contains(key)) continue;
      MUSTER_TRY(show_change(words, "deleted", key, nullptr));
      if (++seen == words.count) return {};
    }
    before = std::move(now);
    ::poll(nullptr, 0, Deadline::after(interval).poll_timeout_ms());
  }
}

Result<> stat(const StoreWords& words, Store& store, const Deadline& deadline) {
  MUSTER_ASSIGN(const StoreStat found, store.stat(deadline));
  return write_out(words.json ? as_json(found) + "\n" : as_text(found));
}

using Run = Result<> (*)(const StoreWords&, Store&, const Deadline&);

struct Line {
  CLI::App app{"Serves a key-value store, or looks into one.", "muster store"};
  StoreWords words;
  std::map<const CLI::App*, Run> commands;
  CLI::App* serve = nullptr;

  Line() {
    app.require_subcommand(0, 1);
    app.fallthrough();
    app.add_option("--store", words.store, "the store; by default the job's (MUSTER_STORE), or tcp://127.0.0.1:29400")
        ->type_name("URL");
    app.add_option("--secret-file", words.secret_file, "holds the secret in hex; by default MUSTER_SECRET")
        ->type_name("FILE");
    app.add_option("--timeout", words.timeout, "to wait for the store, and for what it waits for")
        ->check(number_between(0, kLongest, "a number of seconds from 0 up"))
        ->type_name("SECONDS")
        ->capture_default_str();
    add_serve();
    auto* get_command = add("get", "print the value of a key, as it is", get);
    get_command->add_flag("--wait", words.wait, "wait until the key exists");
    with_key(with_json(get_command));
    auto* set_command = with_key(add("set", "set a key", set));
    auto* value = set_command->add_option("value", words.value, "its value");
    auto* file = set_command->add_option("--file", words.file, "take the value from this file; -: from standard input");
    file->excludes(value);
    set_command->callback([value, file] {
      if (value->empty() && file->empty()) throw CLI::RequiredError("a value, or --file,");
    });
    with_key(add("add", "add to a counter, and print the sum", muster::add))
        ->add_option("amount", words.amount, "by default 1");
    with_key(add("delete", "delete a key", remove));
    with_key(add("barrier", "wait until so many have come to the same barrier", barrier))
        ->add_option("count", words.count, "how many")
        ->required();
    auto* ls = with_prefix(with_json(add("ls", "list the keys", list)));
    ls->add_flag("-l,--values", words.values, "their values too");
    auto* watch_command = with_prefix(with_json(add("watch", "print what changes, until interrupted", watch)));
    watch_command->add_option("--interval", words.interval, "seconds between two looks")
        ->check(number_between(1e-3, kLongest, "a number of seconds from 0.001 up"))
        ->capture_default_str();
    watch_command->add_option("--count", words.count, "end after so many changes")
        ->check(number_between(1, 9e18, "a number from 1 up"));
    with_json(add("stat", "what a store server holds and has done", stat));
  }

 private:
  CLI::App* add(const char* name, const char* summary, Run run) {
    CLI::App* command = app.add_subcommand(name, summary);
    commands[command] = run;
    return command;
  }
  CLI::App* with_key(CLI::App* command) {
    command->add_option("key", words.key, "the key")->required();
    return command;
  }
  CLI::App* with_prefix(CLI::App* command) {
    command->add_option("prefix", words.prefix, "only keys that begin so");
    return command;
  }
  CLI::App* with_json(CLI::App* command) {
    command->add_flag("--json", words.json, "a JSON object for each line");
    return command;
  }
  void add_serve() {
    serve = app.add_subcommand("serve", "serve a store until SIGINT or SIGTERM");
    serve->add_option("--listen", words.serve.listen, "host:port, unix:/path or unix:@name; port 0 takes a free one")
        ->default_str(kDefaultListen);
    serve->add_option("--torch-listen", words.serve.torch_listen, "host:port for torch.distributed.TCPStore clients");
    serve->add_option("--threads", words.serve.threads,
                      "by default one for every two cores, 16 at most; a proxy has one");
    auto* upstream =
        serve->add_option("--upstream", words.serve.upstream, "be a proxy of the store server at this URL");
    serve->add_flag("--tiered", words.serve.tiered, "as a proxy: merge adds and barriers, and answer reads from leases")
        ->needs(upstream);
  }
};

int status_of(const Error& error) {
  switch (error.code) {
    case ErrorCode::kNotFound:
    case ErrorCode::kTimeout:
      return 1;
    case ErrorCode::kInvalidArgument:
      return 2;
    default:
      return 3;
  }
}

Result<> run(Line& line) {
  StoreWords& words = line.words;
  if (line.serve->parsed()) {
    if (words.serve.listen.empty()) words.serve.listen = {kDefaultListen};
    MUSTER_ASSIGN(words.serve.secret, secret(words));
    return serve_store(words.serve);
  }
  const Deadline deadline = Deadline::after(Duration(static_cast<int64_t>(words.timeout * 1e9)));
  MUSTER_ASSIGN(const auto store, open(words, deadline));
  return line.commands.at(line.app.get_subcommands().front())(words, *store, deadline);
}

}  // namespace

int store_command(const std::string&, const std::vector<std::string>& words) {
  Line line;
  if (const auto end = parse_command_line(line.app, words)) return *end;
  if (line.app.get_subcommands().empty()) {
    std::fputs("muster: store: say what to do: serve, get, set, ls, watch, stat, ... (`muster store --help`)\n",
               stderr);
    return 2;
  }
  const Result<> done = run(line);
  if (done) return 0;
  std::fprintf(stderr, "muster: store %s: %s\n", line.app.get_subcommands().front()->get_name().c_str(),
               done.error().message.c_str());
  return status_of(done.error());
}

std::vector<CommandWords> store_subcommands() {
  Line line;
  const auto options = [&](const CLI::App& app) {
    std::vector<std::string> names;
    for (const auto* option : app.get_options())
      for (const auto& name : option->get_lnames())
        if (name != "help") names.push_back("--" + name);
    return names;
  };
  std::vector<CommandWords> all;
  for (const auto* command : line.app.get_subcommands(nullptr)) {
    all.push_back({command->get_name(), {}, options(*command)});
    for (auto& name : options(line.app)) all.back().options.push_back(std::move(name));
  }
  return all;
}

}  // namespace muster
