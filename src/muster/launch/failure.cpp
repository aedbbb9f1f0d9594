#include "muster/launch/failure.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "muster/base/bytes.h"
#include "muster/launch/signals.h"

namespace muster {
namespace {

constexpr int kTracebackLines = 40;
constexpr int kOwnLines = 6;      // lines of the failed rank's stderr, if there is no traceback
constexpr int kLastLines = 2;     // lines of another rank's stderr; if it has none, one line of its stdout
constexpr size_t kLastRanks = 4;  // most outputs of other ranks that a report shows
constexpr size_t kMaxTail = 400;  // bytes of one output

std::string last_lines(std::string_view text, int count) {
  while (text.ends_with('\n')) text.remove_suffix(1);
  size_t begin = text.size();
  while (begin > 0) {
    const bool line_starts = text[begin - 1] == '\n';
    if (line_starts && --count == 0) break;
    --begin;
  }
  return std::string(text.substr(begin));
}

std::string indented(std::string_view text) {
  std::string out;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) out += "\n    " + line;
  return out;
}

/// The text before `at` on its line.
std::string_view prefix_before(std::string_view text, size_t at) {
  const size_t newline = at == 0 ? std::string_view::npos : text.rfind('\n', at - 1);
  const size_t begin = newline == std::string_view::npos ? 0 : newline + 1;
  return text.substr(begin, at - begin);
}

/// True for no prefix, and for "[rank3]: ", which torch puts before a traceback's lines when a process group exists.
bool is_line_prefix(std::string_view prefix) {
  return prefix.empty() || (prefix.starts_with("[rank") && prefix.ends_with("]: "));
}

std::string without_prefix(std::string_view text, std::string_view prefix) {
  std::string out;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    out += line.starts_with(prefix) ? line.substr(prefix.size()) : line;
    if (!lines.eof()) out += '\n';
  }
  return out;
}

std::string name_of_ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + rank_list(ranks);
}

// Returns the JSON that torch's @record writes.
std::string error_json(const std::string& message, int status, const std::string& traceback) {
  const nlohmann::json json = {
      {"message",
       {{"message", message},
        {"errorCode", status},
        {"extraInfo", {{"py_callstack", traceback}, {"timestamp", std::to_string(::time(nullptr))}}}}}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Returns the text at a JSON pointer, if there is one.
std::optional<std::string> text_at(const nlohmann::json& json, const char* path) {
  const nlohmann::json::json_pointer pointer(path);
  if (!json.contains(pointer) || !json[pointer].is_string()) return std::nullopt;
  return json[pointer].get<std::string>();
}

std::string describe_exit(const WorkerExit& exit) {
  return fmt::format("rank {} (host {}, pid {}) {}", exit.rank, exit.host, exit.pid, exit.to_string());
}

}  // namespace

std::string WorkerExit::to_string() const {
  if (signal == 0) return fmt::format("exited with status {}", code);
  const std::string text = fmt::format("was ended by signal {} ({})", signal, signal_name(signal));
  return cause.empty() ? text : text + ": " + cause;
}

WorkerExit worker_exit(int rank, const std::string& host, pid_t pid, int wait_status) {
  if (WIFSIGNALED(wait_status)) return {rank, host, pid, 0, WTERMSIG(wait_status)};
  return {rank, host, pid, WEXITSTATUS(wait_status)};
}

std::string out_of_memory_cause(const CgroupMemory& memory) {
  std::string text = "the kernel's out-of-memory killer ended it";
  if (memory.limit) text += fmt::format(", the memory limit is {}", format_bytes(*memory.limit));
  if (memory.peak) text += fmt::format(", the highest use was {}", format_bytes(*memory.peak));
  return text;
}

int exit_status(const Error& error) {
  if (error.code == ErrorCode::kNotFound) return 127;
  return error.code == ErrorCode::kInvalidArgument ? 126 : 1;
}

int print_error(std::string_view command, const std::string& message, int status) {
  fmt::print(stderr, "muster: {}{}{}\n", command, command.empty() ? "" : ": ", message);
  return status;
}

std::string last_traceback(std::string_view stderr_text) {
  constexpr std::string_view kStart = "Traceback (most recent call last):";
  size_t at = stderr_text.rfind(kStart);
  while (at != std::string_view::npos && at > 0 && !is_line_prefix(prefix_before(stderr_text, at))) {
    at = stderr_text.rfind(kStart, at - 1);
  }
  if (at == std::string_view::npos) return "";
  const std::string text = without_prefix(stderr_text.substr(at), prefix_before(stderr_text, at));
  if (std::count(text.begin(), text.end(), '\n') <= kTracebackLines) return last_lines(text, kTracebackLines + 1);
  return std::string(kStart) + "\n  ...\n" + last_lines(text, kTracebackLines - 2);
}

std::string error_file_traceback(std::string_view json) {
  const auto parsed = nlohmann::json::parse(json, nullptr, false);
  if (const auto message = text_at(parsed, "/message")) return *message;
  if (const auto stack = text_at(parsed, "/message/extraInfo/py_callstack")) return last_lines(*stack, kTracebackLines);
  return text_at(parsed, "/message/message").value_or("");
}

void write_error_file(const std::string& path, const WorkerExit& exit, const std::string& traceback) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0 && info.st_size > 0) return;
  const std::string message = traceback.empty() ? describe_exit(exit) : last_lines(traceback, 1);
  std::ofstream(path) << error_json(message, exit.status(), traceback);
}

void publish_error_file(const std::string& path, const std::string& from, int status, const std::string& report) {
  std::string text;
  if (!from.empty()) {
    std::ifstream file(from);
    text.assign(std::istreambuf_iterator<char>(file), {});
  }
  if (text.empty()) text = error_json(report, status, "");
  // Renames a complete file, because agents of several nodes may share the directory.
  const std::string temporary = fmt::format("{}.{}", path, ::getpid());
  std::ofstream(temporary) << text;
  if (::rename(temporary.c_str(), path.c_str()) != 0) ::unlink(temporary.c_str());
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string out;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    out += (out.empty() ? "" : ", ") + std::to_string(ranks[i]);
    if (last > i) out += (last == i + 1 ? ", " : "-") + std::to_string(ranks[last]);
    i = last + 1;
  }
  return out;
}

std::string output_tails(const std::vector<OutputTail>& others) {
  std::map<std::string, std::vector<int>> by_text;
  for (const auto& other : others) {
    std::string text = last_lines(other.err, kLastLines);
    if (text.empty()) text = last_lines(other.out, 1);
    if (text.size() > kMaxTail) text = "..." + text.substr(text.size() - kMaxTail);
    if (text.empty() || (by_text.size() == kLastRanks && !by_text.contains(text))) continue;
    by_text[text].push_back(other.rank);
  }
  std::string report = by_text.empty() ? "" : "\n  last output of other ranks:";
  for (const auto& [text, ranks] : by_text) report += fmt::format("\n   {}:{}", name_of_ranks(ranks), indented(text));
  return report;
}

std::string failure_report(const WorkerExit& first, std::string_view traceback, std::string_view err,
                           const std::map<std::string, std::vector<int>>& others) {
  std::string report = describe_exit(first);
  if (!traceback.empty()) {
    report += "; its last traceback:" + indented(traceback);
  } else if (!err.empty()) {
    report += "; its last output:" + indented(last_lines(err, kOwnLines));
  }
  std::string_view before = "\n  the other ranks at that moment: ";
  for (const auto& [state, ranks] : others) {
    report += fmt::format("{}{} {}", before, name_of_ranks(ranks), state);
    before = "; ";
  }
  return report;
}

}  // namespace muster
