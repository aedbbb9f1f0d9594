#include "muster/launch/rendezvous/rendezvous_messages.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <span>

#include "muster/launch/options/options.h"

namespace muster {
namespace {

using nlohmann::json;

// The names on the wire, in the order of the enums.
constexpr std::array kNodeEvents = {"join", "alive", "done", "failed", "stopped",
                                    "end",  "leave", "bye",  "move",   "killed"};
constexpr std::array kJobEvents = {"start", "stop", "outcome", "refused", "forgotten", "moved", "progress"};
static_assert(kNodeEvents.size() == static_cast<size_t>(NodeEvent::Kind::kKilled) + 1);
static_assert(kJobEvents.size() == static_cast<size_t>(JobEvent::Kind::kProgress) + 1);

// Writes the fields of one message.
class FieldWriter {
 public:
  void text(const char* name, const std::string& value) { object_[name] = value; }
  void number(const char* name, const std::optional<int>& value, int /*low*/, int /*high*/) {
    if (value) object_[name] = *value;
  }
  template <class Kind>
  void kind(Kind value, std::span<const char* const> names) {
    object_["is"] = names[static_cast<size_t>(value)];
  }
  Bytes take() const { return to_bytes(object_.dump(-1, ' ', false, json::error_handler_t::replace)); }

 private:
  json object_;
};

// Reads the fields of one message. The first missing or wrong field makes the whole message invalid.
class FieldReader {
 public:
  FieldReader(ByteView bytes, const char* what)
      : object_(json::parse(bytes.begin(), bytes.end(), nullptr, /*allow_exceptions=*/false)), what_(what) {
    if (!object_.is_object()) wrong_ = "an object";
  }

  void text(const char* name, std::string& value) {
    if (wrong_.empty() && object_.contains(name) && object_[name].is_string()) {
      value = object_[name].get<std::string>();
    } else {
      reject(name);
    }
  }
  void number(const char* name, int& value, int low, int high) {
    int64_t found = static_cast<int64_t>(low) - 1;
    if (wrong_.empty() && object_.contains(name) && object_[name].is_number_integer())
      found = object_[name].get<int64_t>();
    value = static_cast<int>(std::clamp<int64_t>(found, low, high));
    if (found != value) reject(name);
  }
  void number(const char* name, std::optional<int>& value, int low, int high) {
    if (object_.is_object() && object_.contains(name)) number(name, value.emplace(), low, high);
  }
  template <class Kind, class Names>
  void kind(Kind& value, const Names& names) {
    std::string name;
    text("is", name);
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) return reject("is");
    value = static_cast<Kind>(found - names.begin());
  }
  Result<> status() const {
    if (wrong_.empty()) return {};
    return fail(ErrorCode::kProtocol, std::string("the store does not hold muster's ") + what_ +
                                          ": there is no valid \"" + wrong_ + "\" in it");
  }

 private:
  void reject(const char* name) {
    if (wrong_.empty()) wrong_ = name;
  }
  json object_;
  const char* what_;
  std::string wrong_;
};

// The fields of each message, for both directions. A limit may depend on a field that comes before it.

template <class Archive>
void fields(Archive& archive, NodeInfo& node) {
  archive.text("host", node.host);
  archive.text("process_domain", node.process_domain);
  archive.number("pid", node.pid, 0, INT32_MAX);
  archive.number("nproc", node.nproc, 1, kMaxWorkers);
  archive.number("max", node.max_nodes, 1, kMaxNodes);
  archive.number("min", node.min_nodes, 1, node.max_nodes);
  archive.number("restarts", node.max_restarts, 0, INT32_MAX);
  archive.number("last", node.last_rank, -1, kMaxNodes);
  archive.number("of", node.last_nnodes, 0, kMaxNodes);
  archive.text("role", node.role);
  archive.text("address", node.address);
  archive.number("rank", node.wanted, 0, node.max_nodes - 1);
}

template <class Archive>
void fields(Archive& archive, Outcome& outcome) {
  archive.number("status", outcome.status, 0, 255);
  archive.text("report", outcome.report);
}

template <class Archive>
void fields(Archive& archive, NodeEvent& event) {
  using Kind = NodeEvent::Kind;
  archive.kind(event.kind, kNodeEvents);
  archive.text("id", event.id);
  archive.number("generation", event.generation, 0, INT32_MAX);
  if (event.kind == Kind::kJoin) fields(archive, event.node);
  if (event.kind == Kind::kFailed || event.kind == Kind::kEnd || event.kind == Kind::kLeave)
    fields(archive, event.outcome);
  if (event.kind == Kind::kMove) archive.text("root", event.root);
}

template <class Archive>
void fields(Archive& archive, JobEvent& event) {
  archive.kind(event.kind, kJobEvents);
  archive.number("generation", event.generation, -1, INT32_MAX);  // -1: before the first generation
  archive.text("id", event.id);
  archive.text("text", event.text);
  if (event.kind == JobEvent::Kind::kOutcome) fields(archive, event.outcome);
}

template <class Archive>
void fields(Archive& archive, Assignment& assignment) {
  auto& placement = assignment.placement;
  archive.number("nnodes", placement.nnodes, 1, kMaxNodes);
  archive.number("node", placement.node_rank, 0, placement.nnodes - 1);
  archive.number("nproc", placement.nproc, 1, kMaxWorkers);
  archive.number("world", placement.world_size, placement.nproc, INT32_MAX);
  archive.number("first", placement.first_rank, 0, placement.world_size - placement.nproc);
  archive.number("role_world", placement.role_world_size, placement.nproc, placement.world_size);
  archive.number("role_first", placement.first_role_rank, 0, placement.role_world_size - placement.nproc);
  archive.number("generation", assignment.generation, 0, INT32_MAX);
  archive.number("restarts", assignment.restarts, 0, INT32_MAX);
  archive.text("node0", assignment.node0_addr);
}

template <class Message>
Bytes write_message(Message message) {
  FieldWriter writer;
  fields(writer, message);
  return writer.take();
}

template <class Message>
Result<Message> read_message(ByteView bytes, const char* what) {
  FieldReader reader(bytes, what);
  Message message;
  fields(reader, message);
  MUSTER_TRY(reader.status());
  return message;
}

}  // namespace

Bytes encode(const NodeEvent& event) { return write_message(event); }
Bytes encode(const JobEvent& event) { return write_message(event); }
Bytes encode(const Assignment& assignment) { return write_message(assignment); }

Result<NodeEvent> parse_node_event(ByteView bytes) {
  MUSTER_ASSIGN(NodeEvent event, read_message<NodeEvent>(bytes, "event of a node"));
  event.node.id = event.id;
  return event;
}
Result<JobEvent> parse_job_event(ByteView bytes) { return read_message<JobEvent>(bytes, "event of the root"); }
Result<Assignment> parse_assignment(ByteView bytes) { return read_message<Assignment>(bytes, "assignment of a node"); }

std::string generation_prefix(int generation) { return "generation/" + std::to_string(generation) + "/"; }

}  // namespace muster
