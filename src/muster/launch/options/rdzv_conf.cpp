// --rdzv-conf takes the keys of all rendezvous backends of torchrun.

#include <fmt/format.h>

#include <algorithm>

#include "muster/launch/options/option_values.h"
#include "muster/launch/options/parse_context.h"
#include "muster/store/url.h"

namespace muster {
namespace {

using Pairs = std::map<std::string, std::string>;

// The names of TLS files in torchrun's two etcd backends, and in an etcds:// URL.
constexpr std::pair<const char*, const char*> kTlsKeys[] = {{"ca_cert", "ca"},       {"cacert", "ca"},
                                                            {"ssl_cert", "cert"},    {"cert", "cert"},
                                                            {"ssl_cert_key", "key"}, {"key", "key"}};

constexpr std::pair<const char*, Duration RunOptions::*> kSecondsKeys[] = {
    {"timeout", &RunOptions::timeout},
    {"join_timeout", &RunOptions::timeout},
    {"last_call_timeout", &RunOptions::last_call_timeout},
    {"heartbeat_timeout", &RunOptions::heartbeat_timeout},
    {"close_timeout", &RunOptions::close_timeout}};

std::optional<std::string> take(Pairs& pairs, const char* key) {
  auto found = pairs.extract(key);
  if (found.empty()) return std::nullopt;
  return std::move(found.mapped());
}

std::string what(std::string_view key) { return fmt::format("--rdzv-conf {}", key); }

void without_effect(RunOptions& o, std::string_view key, std::string_view why) {
  o.notices.push_back(fmt::format("{} has no effect: {}", what(key), why));
}

std::string percent_encoded(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const bool special = std::string_view("%?&#=").find(c) != std::string_view::npos || c <= ' ';
    out += special ? fmt::format("%{:02X}", static_cast<unsigned char>(c)) : std::string(1, c);
  }
  return out;
}

Result<> read_timeouts(RunOptions& o, Pairs& pairs) {
  // As in torch, a node is lost after this many missing heartbeats in a row.
  const auto interval = take(pairs, "keep_alive_interval"), attempts = take(pairs, "keep_alive_max_attempt");
  if (interval || attempts) {
    MUSTER_ASSIGN(const Duration every, parse_seconds(what("keep_alive_interval"), interval.value_or("5")));
    MUSTER_ASSIGN(const int times, parse_int(what("keep_alive_max_attempt"), attempts.value_or("3"), 1, 1000,
                                             "a number from 1 to 1000"));
    if (every > Duration::max() / times)
      return bad_option("--rdzv-conf keep_alive_interval times keep_alive_max_attempt is too long");
    o.heartbeat_timeout = every * times;
  }
  for (const auto& [key, field] : kSecondsKeys) {
    const auto text = take(pairs, key);
    if (!text) continue;
    MUSTER_ASSIGN(o.*field, parse_seconds(what(key), *text));
  }
  if (o.heartbeat_timeout > Duration::zero()) return {};
  return bad_option(
      "--rdzv-conf heartbeat_timeout must be more than 0 seconds: nodes send heartbeats within this time");
}

Result<> read_node(RunOptions& o, Pairs& pairs) {
  if (const auto text = take(pairs, "is_host")) {
    o.is_host = to_bool(*text);
    if (!o.is_host) return bad_value(what("is_host"), "true or false", *text);
  }
  const auto rank = take(pairs, "rank");
  if (!rank || o.node_rank) return {};
  MUSTER_ASSIGN(o.node_rank, parse_int(what("rank"), *rank, 0, o.nnodes_max - 1,
                                       fmt::format("a number from 0 to {} (--nnodes)", o.nnodes_max - 1)));
  return {};
}

// Adds `prefix` as the path unless the URL has a path, and adds `files` to the query.
void complete_url(std::string& url, const std::string& prefix, const Pairs& files) {
  std::string query = url.substr(std::min(url.find('?'), url.size()));
  url.resize(url.size() - query.size());
  const bool has_path = url.find('/', url.find("://") + 3) != std::string::npos;
  if (!prefix.empty() && !has_path) url += (prefix.starts_with('/') ? "" : "/") + percent_encoded(prefix);
  for (const auto& [name, file] : files)
    query += fmt::format("{}{}={}", query.empty() ? '?' : '&', name, percent_encoded(file));
  url += query;
}

// Adds etcd's keys to its URL, because the rest of the program reads them from the URL.
Result<> read_etcd(RunOptions& o, Pairs& pairs) {
  const auto prefix = take(pairs, "etcd_prefix"), protocol = take(pairs, "protocol");
  Pairs files;
  for (const auto& [key, of_url] : kTlsKeys)
    if (auto file = take(pairs, key)) files[of_url] = std::move(*file);
  if (o.rdzv_backend != "etcd") {
    if (prefix || protocol || !files.empty())
      without_effect(o,
                     prefix     ? "etcd_prefix"
                     : protocol ? "protocol"
                                : "for certificates",
                     fmt::format("it is for --rdzv-backend etcd, not {}", o.rdzv_backend));
    return {};
  }
  if (protocol && *protocol != "http" && *protocol != "https")
    return bad_value(what("protocol"), "http or https", *protocol);
  std::string& url = o.rdzv_url;
  if (protocol == "https" && url.starts_with("etcd://")) url.insert(4, "s");
  if (!files.empty() && !url.starts_with("etcds://"))
    return bad_option("--rdzv-conf names certificates for etcd: add protocol=https");
  complete_url(url, prefix.value_or(""), files);
  return {};
}

Result<> read_store(RunOptions& o, Pairs& pairs) {
  const auto type = take(pairs, "store_type");
  if (type && *type != "tcp" && *type != "file") return bad_value(what("store_type"), "tcp or file", *type);
  if (type == "tcp" && o.rdzv_backend == "file")
    return bad_option("--rdzv-conf store_type=tcp and --rdzv-backend file contradict each other");
  if (type == "file" && o.rdzv_backend != "file")
    without_effect(o, "store_type",
                   o.rdzv_url.empty() ? "a job of one node has no rendezvous"
                                      : "the rendezvous is in " + without_password(o.rdzv_url));
  if (take(pairs, "read_timeout"))
    without_effect(o, "read_timeout", "a lost store is noticed within heartbeat_timeout");
  return {};
}

}  // namespace

Result<> choose_file_store(ParseContext& r) {
  MUSTER_ASSIGN(const auto pairs, parse_pairs("--rdzv-conf", r.raw.rdzv_conf));
  std::string& backend = r.options.rdzv_backend;
  const bool alone = r.options.nnodes_max == 1 && r.raw.rdzv_endpoint.empty();  // then there is no rendezvous
  if (value_of(pairs, "store_type") == "file" && is_own_store(backend) && !alone) backend = "file";
  return {};
}

Result<> read_rdzv_conf(ParseContext& r) {
  RunOptions& o = r.options;
  o.last_call_timeout = std::chrono::seconds(30);  // torch's default
  o.heartbeat_timeout = o.close_timeout = std::chrono::seconds(10);
  MUSTER_ASSIGN(Pairs pairs, parse_pairs("--rdzv-conf", r.raw.rdzv_conf));
  MUSTER_TRY(read_timeouts(o, pairs));
  MUSTER_TRY(read_node(o, pairs));
  MUSTER_TRY(read_etcd(o, pairs));
  MUSTER_TRY(read_store(o, pairs));
  if (pairs.empty()) return {};
  return bad_value(
      "--rdzv-conf",
      "join_timeout, last_call_timeout, heartbeat_timeout, close_timeout, is_host and torchrun's other keys",
      pairs.begin()->first);
}

}  // namespace muster
