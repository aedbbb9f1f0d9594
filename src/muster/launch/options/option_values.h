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

// Parsers of the values of options. kInvalidArgument says "--option takes ..., not '...'".

tl::unexpected<Error> bad_option(std::string message);

template <class Number>
std::optional<Number> to_number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

Result<int> parse_int(std::string_view option, const std::string& text, int low, int high, std::string_view takes);
Result<Duration> parse_seconds(std::string_view option, const std::string& text);
/// true, false, yes, no, on, off, 1, 0 in any case.
std::optional<bool> to_bool(std::string text);
/// Splits "a,b"; a doubled comma is part of the word.
std::vector<std::string> split_list(const std::string& text);
Result<StreamChoice> parse_streams(std::string_view option, const std::string& text);
Result<std::set<int>> parse_ranks(std::string_view option, const std::string& text);
/// "SIGTERM,USR1". SIGTERM, SIGINT and SIGHUP are always included, because a job is stopped by them.
Result<std::vector<int>> parse_signals(std::string_view option, const std::string& text);
/// "key=value,key=value".
Result<std::map<std::string, std::string>> parse_pairs(std::string_view option, const std::string& text);
/// "a,b:8,[::1]:2".
Result<std::vector<HostSlot>> parse_hosts(std::string_view option, const std::string& text);
/// One host a line, "name", "name:8" or "name slots=8"; '#' begins a comment.
Result<std::vector<HostSlot>> read_hostfile(const std::string& path);
/// A line of standard input, of at most 4 KiB. Nothing after the line is read.
std::string read_stdin_line();
/// The job's secret from `file` (--secret-file: its first word, or a line of standard input for "-"), or without a file
/// from `variable`, the value of MUSTER_SECRET. Empty if neither is given. kInvalidArgument if it is not hex, is
/// shorter than 16 bytes, or if other users can read the file.
Result<Bytes> read_secret(const std::string& file, const std::string& variable);

}  // namespace muster
