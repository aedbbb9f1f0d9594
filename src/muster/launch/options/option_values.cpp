#include "muster/launch/options/option_values.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <csignal>
#include <fstream>
#include <sstream>

#include "muster/io/address.h"
#include "muster/io/connect/handshake.h"
#include "muster/io/fd.h"
#include "muster/launch/signals.h"

namespace muster {
namespace {

constexpr int kMaxRank = 1 << 16;
constexpr size_t kMaxLine = 4096;

// Reads the first word of a file that only its owner can read. A shell's <(...) is a pipe without a name, so other
// users cannot open it.
Result<std::string> read_private_word(const std::string& option, const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (!file || ::fstat(file.get(), &info) != 0) return bad_option(option + ": the file cannot be read");
  const bool is_ours = info.st_uid == ::geteuid() || info.st_uid == 0;
  if (S_ISREG(info.st_mode) && ((info.st_mode & 077) != 0 || !is_ours))
    return bad_option(fmt::format("{}: other users can read or change the file (mode {:04o}): run chmod 600 on it",
                                  option, info.st_mode & 07777));
  std::array<char, kMaxLine> text{};
  size_t size = 0;
  for (ssize_t count = 0; size < text.size(); size += static_cast<size_t>(count)) {
    count = ::read(file.get(), text.data() + size, text.size() - size);
    if (count < 0) return bad_option(option + ": the file cannot be read");
    if (count == 0) break;
  }
  std::istringstream words(std::string(text.data(), size));
  std::string word;
  words >> word;
  return word;
}

std::optional<Streams> to_streams(std::string_view text) {
  const auto digit = to_number<int>(text);
  if (!digit || *digit < 0 || *digit > kBothStreams) return std::nullopt;
  return static_cast<Streams>(*digit);
}

Result<HostSlot> parse_host(std::string_view option, const std::string& text, const std::string& slots) {
  // A name that begins with a dash would be an option of ssh.
  const auto found = parse_host_port(text, 0);
  const bool count_is_zero = found && found->port == 0 && parse_host_port(text, 1)->port == 0;
  if (!found || found->host.empty() || found->host[0] == '-' || count_is_zero)
    return bad_value(option, "names or addresses of hosts", text);
  HostSlot slot{found->host, found->port};
  if (slots.empty()) return slot;
  constexpr std::string_view kSlots = "slots=";
  const auto number = slots.starts_with(kSlots) ? to_number<int>(slots.substr(kSlots.size())) : std::nullopt;
  if (!number || *number < 1 || *number > kMaxRank)
    return bad_option(fmt::format("{}: after a host it takes slots=N, not '{}'", option, slots));
  slot.nproc = *number;
  return slot;
}

}  // namespace

tl::unexpected<Error> bad_option(std::string message) { return fail(ErrorCode::kInvalidArgument, std::move(message)); }

tl::unexpected<Error> bad_value(std::string_view option, std::string_view takes, std::string_view value) {
  return bad_option(fmt::format("{} takes {}, not '{}'", option, takes, value));
}

Result<int> parse_int(std::string_view option, const std::string& text, int low, int high, std::string_view takes) {
  const auto value = to_number<int>(text);
  if (value && *value >= low && *value <= high) return *value;
  return bad_value(option, takes, text);
}

Result<Duration> parse_seconds(std::string_view option, const std::string& text) {
  constexpr double kMax = 1e8;
  const auto seconds = to_number<double>(text);
  if (seconds && *seconds >= 0 && *seconds <= kMax)
    return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(*seconds));
  return bad_value(option, "a number of seconds", text);
}

std::optional<bool> to_bool(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  if (text == "true" || text == "1" || text == "yes" || text == "on") return true;
  if (text == "false" || text == "0" || text == "no" || text == "off") return false;
  return std::nullopt;
}

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> words(1);
  for (size_t i = 0; i < text.size(); ++i) {
    const bool doubled = text.compare(i, 2, ",,") == 0;
    if (text[i] == ',' && !doubled) {
      words.emplace_back();
    } else {
      words.back() += text[i];
      i += doubled ? 1 : 0;
    }
  }
  std::erase(words, "");
  return words;
}

Result<StreamChoice> parse_streams(std::string_view option, const std::string& text) {
  const auto refuse = [&] {
    return bad_value(option, "0, 1 (stdout), 2 (stderr) or 3 (both), or one of them for local ranks as 0:1,1:2", text);
  };
  StreamChoice choice;
  if (const auto all = to_streams(text)) return StreamChoice{*all, {}};
  for (const auto& word : split_list(text)) {
    const size_t colon = std::min(word.find(':'), word.size());
    const auto rank = to_number<int>(std::string_view(word).substr(0, colon));
    const auto streams = colon < word.size() ? to_streams(std::string_view(word).substr(colon + 1)) : std::nullopt;
    if (!rank || *rank < 0 || *rank > kMaxRank || !streams) return refuse();
    choice.by_local_rank[*rank] = *streams;
  }
  if (choice.by_local_rank.empty()) return refuse();
  return choice;
}

Result<std::set<int>> parse_ranks(std::string_view option, const std::string& text) {
  std::set<int> ranks;
  for (const auto& word : split_list(text)) {
    MUSTER_ASSIGN(const int rank, parse_int(option, word, 0, kMaxRank, "local ranks, as 0,1,2"));
    ranks.insert(rank);
  }
  return ranks;
}

Result<std::vector<int>> parse_signals(std::string_view option, const std::string& text) {
  constexpr std::array kNever = {SIGKILL, SIGSTOP, SIGCHLD, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
  std::vector<int> numbers = {SIGTERM, SIGINT, SIGHUP};
  for (const auto& word : split_list(text)) {
    const auto number = signal_number(word);
    if (!number || std::find(kNever.begin(), kNever.end(), *number) != kNever.end())
      return bad_value(option, "signals that can be handled, as SIGTERM,SIGUSR1", word);
    if (std::find(numbers.begin(), numbers.end(), *number) == numbers.end()) numbers.push_back(*number);
  }
  return numbers;
}

Result<std::map<std::string, std::string>> parse_pairs(std::string_view option, const std::string& text) {
  std::map<std::string, std::string> pairs;
  for (const auto& word : split_list(text)) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == word.size())
      return bad_value(option, "key=value,key=value", word);
    pairs[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return pairs;
}

Result<std::vector<HostSlot>> parse_hosts(std::string_view option, const std::string& text) {
  std::vector<HostSlot> hosts;
  for (const auto& word : split_list(text)) {
    MUSTER_ASSIGN(hosts.emplace_back(), parse_host(option, word, ""));
  }
  return hosts;
}

Result<std::vector<HostSlot>> read_hostfile(const std::string& path) {
  const std::string option = "--hostfile " + path;
  std::ifstream file(path);
  std::vector<HostSlot> hosts;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line.substr(0, line.find('#')));
    std::string host, slots;
    if (!(words >> host)) continue;
    for (std::string word; words >> word;) slots += (slots.empty() ? "" : " ") + word;
    MUSTER_ASSIGN(hosts.emplace_back(), parse_host(option, host, slots));
  }
  if (hosts.empty())
    return bad_option(option + (file.eof() ? ": no host is listed in it" : ": the file cannot be read"));
  return hosts;
}

std::string read_stdin_line() {
  std::string text;
  // Reads byte by byte, because another reader takes the bytes after the line.
  for (char c = 0; text.size() < kMaxLine && ::read(STDIN_FILENO, &c, 1) == 1 && c != '\n';) text += c;
  return text;
}

Result<Bytes> read_secret(const std::string& file, const std::string& variable) {
  const std::string source = file.empty() ? "MUSTER_SECRET" : "--secret-file " + file;
  std::string text = variable;
  if (file == "-") {
    text = read_stdin_line();
  } else if (!file.empty()) {
    MUSTER_ASSIGN(text, read_private_word(source, file));
  }
  if (text.empty() && !file.empty())
    return bad_option(source + ": the file is empty; it takes the job's secret in hex");
  return parse_secret(text, source);
}

}  // namespace muster
