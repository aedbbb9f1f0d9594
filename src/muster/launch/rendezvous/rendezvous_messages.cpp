#include "muster/launch/rendezvous/rendezvous_messages.h"

#include <array>
#include <nlohmann/json.hpp>

#include "muster/launch/options/options.h"

namespace muster {
namespace {

using nlohmann::json;

template <class Kind>
struct Named {
  Kind kind;
  const char* name;
};
constexpr std::array kCalls = {
    Named<NodeEvent::Kind>{NodeEvent::Kind::kJoin, "join"},
    Named<NodeEvent::Kind>{NodeEvent::Kind::kAlive, "alive"},
    Named<NodeEvent::Kind>{NodeEvent::Kind::kDone, "done"},
    Named<NodeEvent::Kind>{NodeEvent::Kind::kFailed, "failed"},
    Named<NodeEvent::Kind>{NodeEvent::Kind::kStopped, "stopped"},
    Named<NodeEvent::Kind>{NodeEvent::Kind::kEnd, "end"},
    Named<NodeEvent::Kind>{NodeEvent::Kind::kLeave, "leave"},
    Named<NodeEvent::Kind>{NodeEvent::Kind::kBye, "bye"},
    Named<NodeEvent::Kind>{NodeEvent::Kind::kKilled, "killed"},
};
constexpr std::array kNews = {
    Named<JobEvent::Kind>{JobEvent::Kind::kStart, "start"},
    Named<JobEvent::Kind>{JobEvent::Kind::kStop, "stop"},
    Named<JobEvent::Kind>{JobEvent::Kind::kOutcome, "outcome"},
    Named<JobEvent::Kind>{JobEvent::Kind::kRefused, "refused"},
    Named<JobEvent::Kind>{JobEvent::Kind::kEvicted, "forgotten"},
    Named<JobEvent::Kind>{JobEvent::Kind::kProgress, "progress"},
};

template <class Table>
const char* name_in(const Table& table, decltype(Table::value_type::kind) kind) {
  for (const auto& entry : table)
    if (entry.kind == kind) return entry.name;
  return "";
}

Bytes dump(const json& value) { return to_bytes(value.dump(-1, ' ', false, json::error_handler_t::replace)); }

// The fields of one object; the first that is missing or of another kind makes the whole of it bad.
class Fields {
 public:
  Fields(ByteView bytes, const char* what)
      : object_(json::parse(bytes.begin(), bytes.end(), nullptr, /*allow_exceptions=*/false)), what_(what) {
    if (!object_.is_object()) bad_ = "an object";
  }

  std::string text(const char* name) {
    if (bad_.empty() && object_.contains(name) && object_[name].is_string()) return object_[name].get<std::string>();
    return miss(name), std::string();
  }
  int number(const char* name, int low, int high) {
    if (bad_.empty() && object_.contains(name) && object_[name].is_number_integer()) {
      const auto value = object_[name].get<int64_t>();
      if (value >= low && value <= high) return static_cast<int>(value);
    }
    return miss(name), low;
  }
  bool has(const char* name) const { return object_.is_object() && object_.contains(name); }

  template <class Table>
  auto kind(const Table& table) {
    const std::string name = text("is");
    for (const auto& entry : table)
      if (name == entry.name) return entry.kind;
    miss("is");
    return table.front().kind;
  }

  Result<> status() const {
    if (bad_.empty()) return {};
    return fail(ErrorCode::kProtocol, std::string("the store holds something else than muster's ") + what_ +
                                          ": there is no good \"" + bad_ + "\" in it");
  }

 private:
  void miss(const char* name) {
    if (bad_.empty()) bad_ = name;
  }
  json object_;
  const char* what_;
  std::string bad_;
};

json describe(const NodeInfo& node) {
  json value = {{"host", node.host},      {"pid", node.pid},       {"nproc", node.nproc},
                {"min", node.min_nodes},  {"max", node.max_nodes}, {"last", node.last_rank},
                {"of", node.last_nnodes}, {"role", node.role},     {"restarts", node.max_restarts}};
  value["process_domain"] = node.process_domain;
  if (node.wanted) value["rank"] = *node.wanted;
  return value;
}

NodeInfo read_node(Fields& fields, const std::string& id) {
  NodeInfo node;
  node.id = id;
  node.host = fields.text("host");
  if (fields.has("process_domain")) node.process_domain = fields.text("process_domain");
  node.pid = fields.number("pid", 0, INT32_MAX);
  node.nproc = fields.number("nproc", 1, kMaxWorkers);
  node.max_nodes = fields.number("max", 1, kMaxNodes);
  node.min_nodes = fields.number("min", 1, node.max_nodes);
  node.max_restarts = fields.number("restarts", 0, INT32_MAX);
  node.last_rank = fields.number("last", -1, kMaxNodes);
  node.last_nnodes = fields.number("of", 0, kMaxNodes);
  node.role = fields.text("role");
  if (fields.has("rank")) node.wanted = fields.number("rank", 0, node.max_nodes - 1);
  return node;
}

void add_outcome(json& value, const Outcome& outcome) {
  value["status"] = outcome.status;
  value["report"] = outcome.report;
}

Outcome read_outcome(Fields& fields) { return {fields.number("status", 0, 255), fields.text("report")}; }

bool carries_outcome(NodeEvent::Kind kind) {
  return kind == NodeEvent::Kind::kFailed || kind == NodeEvent::Kind::kEnd || kind == NodeEvent::Kind::kLeave;
}

}  // namespace

Bytes encode(const NodeEvent& call) {
  json value = call.kind == NodeEvent::Kind::kJoin ? describe(call.node) : json::object();
  value["is"] = name_in(kCalls, call.kind);
  value["id"] = call.id;
  value["generation"] = call.generation;
  if (carries_outcome(call.kind)) add_outcome(value, call.outcome);
  return dump(value);
}

Result<NodeEvent> parse_call(ByteView bytes) {
  Fields fields(bytes, "word of a node");
  NodeEvent call;
  call.kind = fields.kind(kCalls);
  call.id = fields.text("id");
  call.generation = fields.number("generation", 0, INT32_MAX);
  if (call.kind == NodeEvent::Kind::kJoin) call.node = read_node(fields, call.id);
  if (carries_outcome(call.kind)) call.outcome = read_outcome(fields);
  MUSTER_TRY(fields.status());
  return call;
}

Bytes encode(const JobEvent& news) {
  json value = {
      {"is", name_in(kNews, news.kind)}, {"generation", news.generation}, {"id", news.id}, {"text", news.text}};
  if (news.kind == JobEvent::Kind::kOutcome) add_outcome(value, news.outcome);
  return dump(value);
}

Result<JobEvent> parse_news(ByteView bytes) {
  Fields fields(bytes, "news of the root");
  JobEvent news;
  news.kind = fields.kind(kNews);
  news.generation = fields.number("generation", -1, INT32_MAX);  // -1: before the first
  news.id = fields.text("id");
  news.text = fields.text("text");
  if (news.kind == JobEvent::Kind::kOutcome) news.outcome = read_outcome(fields);
  MUSTER_TRY(fields.status());
  return news;
}

Bytes encode(const Assignment& assignment) {
  const Placement& place = assignment.place;
  return dump({{"node", place.node_rank},
               {"nnodes", place.nnodes},
               {"nproc", place.nproc},
               {"first", place.first_rank},
               {"world", place.world_size},
               {"role_first", place.first_role_rank},
               {"role_world", place.role_world_size},
               {"generation", assignment.generation},
               {"restarts", assignment.restarts}});
}

Result<Assignment> parse_assignment(ByteView bytes) {
  Fields fields(bytes, "place of a node");
  Assignment assignment;
  Placement& place = assignment.place;
  place.nnodes = fields.number("nnodes", 1, kMaxNodes);
  place.node_rank = fields.number("node", 0, place.nnodes - 1);
  place.nproc = fields.number("nproc", 1, kMaxWorkers);
  place.world_size = fields.number("world", place.nproc, INT32_MAX);
  place.first_rank = fields.number("first", 0, place.world_size - place.nproc);
  place.role_world_size = fields.number("role_world", place.nproc, place.world_size);
  place.first_role_rank = fields.number("role_first", 0, place.role_world_size - place.nproc);
  assignment.generation = fields.number("generation", 0, INT32_MAX);
  assignment.restarts = fields.number("restarts", 0, INT32_MAX);
  MUSTER_TRY(fields.status());
  return assignment;
}

std::string generation_prefix(int generation) { return "generation/" + std::to_string(generation) + "/"; }

}  // namespace muster
