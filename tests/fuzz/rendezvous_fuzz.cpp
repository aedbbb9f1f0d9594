// The records that the agents and their root read from a store. Any process with the secret can write to the store. The
// first byte says what follows: an assignment, an event of the root, or events of nodes, one per line. Each record must
// be parsed or refused, and the root's state must stay valid.
#include <algorithm>

#include "muster/base/check.h"
#include "muster/launch/rendezvous/rendezvous.h"

namespace muster {
namespace {

void read_assignment(ByteView bytes) {
  const auto assignment = parse_assignment(bytes);
  if (!assignment) return;
  const Placement& placement = assignment->placement;
  MUSTER_CHECK(placement.node_rank >= 0 && placement.node_rank < placement.nnodes, "a node outside of its job");
  MUSTER_CHECK(placement.first_rank >= 0 && placement.first_rank + placement.nproc <= placement.world_size,
               "ranks outside the world");
  MUSTER_CHECK(parse_assignment(encode(*assignment)).has_value(), "an assignment is not read as it was written");
}

void read_job_event(ByteView bytes) {
  const auto event = parse_job_event(bytes);
  if (event) MUSTER_CHECK(parse_job_event(encode(*event)).has_value(), "an event is not read as it was written");
}

void check_assignments(const JobRendezvous& rendezvous) {
  int node = 0, world = 0;
  for (const auto& [id, assignment] : rendezvous.assignments()) {
    MUSTER_CHECK(assignment.placement.node_rank == node++, "node ranks have a gap");
    MUSTER_CHECK(assignment.placement.first_rank == world, "ranks have a gap");
    world += assignment.placement.nproc;
    MUSTER_CHECK(assignment.placement.role_world_size <= assignment.placement.world_size,
                 "a role is larger than the world");
  }
  MUSTER_CHECK(node <= 3, "more nodes than the job has");
}

void handle_events(ByteView bytes) {
  RendezvousOptions options;
  options.min_nodes = 1;
  options.max_nodes = 3;
  options.max_restarts = 2;
  options.last_call = Duration::zero();
  options.restart_delay = std::chrono::seconds(4);
  TimePoint now{1};
  JobRendezvous rendezvous(options, now);
  while (!bytes.empty()) {
    const auto line = std::find(bytes.begin(), bytes.end(), '\n');
    const auto length = static_cast<size_t>(line - bytes.begin());
    // Each tab in a line advances the time by one second.
    now = now + std::chrono::seconds(std::count(bytes.begin(), line, '\t'));
    if (const auto event = parse_node_event(bytes.first(length))) {
      (void)rendezvous.handle(*event, now);
    } else {
      (void)rendezvous.tick(now);
    }
    check_assignments(rendezvous);
    MUSTER_CHECK(rendezvous.restarts() <= options.max_restarts, "more restarts than were allowed");
    bytes = bytes.subspan(std::min(length + 1, bytes.size()));
  }
}

}  // namespace
}  // namespace muster

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const muster::ByteView rest{data + 1, size - 1};
  if (data[0] % 4 == 0) muster::read_assignment(rest);
  if (data[0] % 4 == 1) muster::read_job_event(rest);
  if (data[0] % 4 >= 2) muster::handle_events(rest);
  return 0;
}
