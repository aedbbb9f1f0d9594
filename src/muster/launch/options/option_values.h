#pragma once

#include <charconv>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "muster/launch/options/options.h"

namespace muster {

// Parsers of the values of options. They fail with kInvalidArgument and the message "--option takes ..., not '...'".

tl::unexpected<Error> bad_option(std::string message);
tl::unexpected<Error> bad_value(std::string_view option, std::string_view takes, std::string_view value);

template <class Number>
std::optional<Number> to_number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

Result<int> parse_int(std::string_view option, const std::string& text, int low, int high, std::string_view takes);
Result<Duration> parse_seconds(std::string_view option, const std::string& text);
/// Accepts true, false, yes, no, on, off, 1 and 0 in any case.
std::optional<bool> to_bool(std::string text);
/// Splits "a,b"; a doubled comma is part of the word.
std::vector<std::string> split_list(const std::string& text);
Result<StreamChoice> parse_streams(std::string_view option, const std::string& text);
Result<std::set<int>> parse_ranks(std::string_view option, const std::string& text);
/// Parses "SIGTERM,USR1". SIGTERM, SIGINT and SIGHUP are always included, because they stop a job.
Result<std::vector<int>> parse_signals(std::string_view option, const std::string& text);
/// Parses "key=value,key=value".
Result<std::map<std::string, std::string>> parse_pairs(std::string_view option, const std::string& text);
/// Parses "a,b:8,[::1]:2".
Result<std::vector<HostSlot>> parse_hosts(std::string_view option, const std::string& text);
/// Reads one host per line: "name", "name:8" or "name slots=8". '#' begins a comment.
Result<std::vector<HostSlot>> read_hostfile(const std::string& path);
/// Reads a line of at most 4 KiB from standard input. Reads nothing after the line.
std::string read_stdin_line();
/// Reads the job's secret from `file`: the first word of the --secret-file, or a line of standard input for "-".
/// Without a file it is `variable`, the value of MUSTER_SECRET. Empty if neither is given. kInvalidArgument if the
/// secret is not hex or is shorter than 16 bytes, or if other users can read the file.
Result<Bytes> read_secret(const std::string& file, const std::string& variable);

}  // namespace muster
