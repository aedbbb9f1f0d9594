#include "muster/launch/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace muster {
namespace {

using nlohmann::json;

constexpr Duration kAnswerTime = std::chrono::seconds(30);
constexpr size_t kMaxNamed = 16;  // of the nodes that are missing

Bytes dump(const json& value) { return to_bytes(value.dump(-1, ' ', false, json::error_handler_t::replace)); }

json describe(const NodeInfo& node) {
  return {{"host", node.host}, {"pid", node.pid}, {"nproc", node.nproc}, {"nnodes", node.nnodes}};
}

// The store may hold anything: whoever has the job's secret can write to it.
Result<json> parse_object(ByteView bytes, const std::string& what) {
  json value = json::parse(bytes.begin(), bytes.end(), nullptr, false);
  if (value.is_object()) return value;
  return fail(ErrorCode::kProtocol, "the store holds something else than muster's at " + what);
}

int number(const json& object, const char* name) {
  return object.contains(name) && object[name].is_number_integer() ? object[name].get<int>() : 0;
}

std::string text(const json& object, const char* name) {
  return object.contains(name) && object[name].is_string() ? object[name].get<std::string>() : "";
}

Result<NodeInfo> parse_node(ByteView bytes, const std::string& what) {
  MUSTER_ASSIGN(const json value, parse_object(bytes, what));
  NodeInfo node{text(value, "host"), number(value, "pid"), number(value, "nproc"), number(value, "nnodes")};
  if (node.nproc < 1 || node.nproc > 1 << 16) return fail(ErrorCode::kProtocol, "no number of workers at " + what);
  return node;
}

Result<Outcome> parse_outcome(ByteView bytes) {
  MUSTER_ASSIGN(const json value, parse_object(bytes, "outcome"));
  return Outcome{number(value, "status"), text(value, "report"), number(value, "node")};
}

}  // namespace

Result<> JobBoard::agree_on_nnodes(const NodeInfo& self, const Deadline& deadline) {
  const Bytes mine = dump({{"host", self.host}, {"nnodes", self.nnodes}});
  MUSTER_ASSIGN(const Bytes holds, store_.compare_set(key("job"), {}, mine, deadline));
  MUSTER_ASSIGN(const json first, parse_object(holds, "job"));
  if (number(first, "nnodes") == self.nnodes) return {};
  return fail(ErrorCode::kMismatch,
              fmt::format("this node was started with --nnodes {}, but the job was begun by host {} with --nnodes {}; "
                          "give all nodes the same",
                          self.nnodes, text(first, "host"), number(first, "nnodes")));
}

Result<int> JobBoard::take_place(const NodeInfo& self, std::optional<int> wanted, const Deadline& deadline) {
  const Bytes mine = dump(describe(self));
  int64_t first = wanted.value_or(0);
  if (!wanted) {
    MUSTER_ASSIGN(first, store_.add(key("arrivals"), 1, deadline));
  }
  const int tries = wanted ? 1 : self.nnodes;
  std::string holder;
  for (int i = 0; i < tries; ++i) {
    const int place = static_cast<int>((first + i) % self.nnodes);
    const std::string name = fmt::format("node/{}", place);
    MUSTER_ASSIGN(const Bytes holds, store_.compare_set(key(name), {}, mine, deadline));
    if (holds == mine) return place;
    MUSTER_ASSIGN(const NodeInfo other, parse_node(holds, name));
    holder = fmt::format("host {} (agent's pid {})", other.host, other.pid);
  }
  if (!wanted)
    return fail(ErrorCode::kAlreadyExists, fmt::format("all {} nodes of the job are there already", self.nnodes));
  return fail(ErrorCode::kAlreadyExists,
              fmt::format("node rank {} is taken by {}; give each node its own --node-rank", *wanted, holder));
}

Result<std::vector<NodeInfo>> JobBoard::await_nodes(int nnodes, Duration timeout) {
  std::vector<Key> keys;
  for (int node = 0; node < nnodes; ++node) keys.push_back(key(fmt::format("node/{}", node)));
  const auto values = store_.multi_get(keys, Deadline::after(timeout));
  std::vector<NodeInfo> nodes;
  if (values) {
    for (int node = 0; node < nnodes; ++node) {
      MUSTER_ASSIGN(nodes.emplace_back(),
                    parse_node((*values)[static_cast<size_t>(node)], fmt::format("node/{}", node)));
    }
    return nodes;
  }
  if (values.error().code != ErrorCode::kTimeout) return tl::unexpected(values.error());
  std::vector<int> missing;
  for (int node = 0; node < nnodes && missing.size() < kMaxNamed; ++node) {
    const auto there = store_.check({keys[static_cast<size_t>(node)]}, Deadline::after(kAnswerTime));
    if (!there || !*there) missing.push_back(node);
  }
  return fail(ErrorCode::kTimeout,
              fmt::format("of {} nodes {} {} did not come within {:g} s; start `muster run` there, or give a longer "
                          "--timeout",
                          nnodes, missing.size() == 1 ? "node" : "nodes", rank_list(missing),
                          std::chrono::duration<double>(timeout).count()));
}

Result<Placement> JobBoard::join(const NodeInfo& self, std::optional<int> wanted, Duration timeout) {
  const Deadline answer = Deadline::after(std::max(timeout, kAnswerTime));
  MUSTER_TRY(agree_on_nnodes(self, answer));
  MUSTER_ASSIGN(const int place, take_place(self, wanted, answer));
  MUSTER_ASSIGN(const auto nodes, await_nodes(self.nnodes, timeout));
  Placement placement{place, self.nnodes, self.nproc, 0, 0};
  for (int node = 0; node < self.nnodes; ++node) {
    if (node == place) placement.first_rank = placement.world_size;
    placement.world_size += nodes[static_cast<size_t>(node)].nproc;
  }
  return placement;
}

Result<> JobBoard::publish_exit(const WorkerExit& exit, const Deadline& deadline) {
  const json value = {{"host", exit.host}, {"pid", exit.pid}, {"code", exit.code}, {"signal", exit.signal}};
  return store_.set(key(fmt::format("exit/{}", exit.rank)), dump(value), deadline);
}

Result<> JobBoard::node_done(int nnodes, const Deadline& deadline) {
  MUSTER_ASSIGN(const int64_t done, store_.add(key("done"), 1, deadline));
  if (done != nnodes) return {};
  auto holds = conclude(Outcome{}, deadline);
  if (!holds) return tl::unexpected(std::move(holds).error());
  return {};
}

Result<Outcome> JobBoard::conclude(const Outcome& proposed, const Deadline& deadline) {
  const Bytes mine = dump({{"status", proposed.status}, {"report", proposed.report}, {"node", proposed.node_rank}});
  MUSTER_ASSIGN(const Bytes holds, store_.compare_set(key("outcome"), {}, mine, deadline));
  return parse_outcome(holds);
}

Result<Outcome> JobBoard::await_outcome(const Deadline& deadline) {
  MUSTER_ASSIGN(const Bytes value, store_.get(key("outcome"), deadline));
  return parse_outcome(value);
}

Result<> JobBoard::leave(int nnodes, const Deadline& deadline) {
  MUSTER_ASSIGN(const int64_t left, store_.add(key("left"), 1, deadline));
  if (left != nnodes) return {};
  return store_.set(key("all-left"), as_bytes("1"), deadline);
}

Result<> JobBoard::await_all_left(const Deadline& deadline) { return store_.wait({key("all-left")}, deadline); }

}  // namespace muster
