#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "muster/launch/rendezvous/rendezvous.h"

namespace muster {

// The test sends the events of all nodes, and sets the clock.
class Rendezvouses : public ::testing::Test {
 protected:
  void make(int min_nodes, int max_nodes, int max_restarts = 0, int first_generation = 0) {
    options_.min_nodes = min_nodes;
    options_.max_nodes = max_nodes;
    options_.max_restarts = max_restarts;
    options_.first_generation = first_generation;
    rendezvous_.emplace(options_, now_);
  }

  std::vector<JobEvent> send(NodeEvent::Kind kind, const std::string& id, const std::string& report = "",
                             int status = 1) {
    NodeEvent event{kind, id, rendezvous_->generation()};
    event.outcome = {status, report};
    return rendezvous_->handle(event, now_);
  }

  std::vector<JobEvent> join(const std::string& id, std::optional<int> wanted = {}, int nproc = 1, int last_rank = -1,
                             int last_nnodes = 0) {
    NodeInfo node{id, "host-" + id, "", 100, nproc, options_.min_nodes, options_.max_nodes, "default", wanted};
    node.last_rank = last_rank;
    node.last_nnodes = last_nnodes;
    node.max_restarts = options_.max_restarts;
    node.address = "address-of-" + id;
    NodeEvent event{NodeEvent::Kind::kJoin, id};
    event.node = node;
    return rendezvous_->handle(event, now_);
  }

  std::vector<JobEvent> wait(Duration duration) {
    now_ = now_ + duration;
    return rendezvous_->tick(now_);
  }
  // Advances the clock while the nodes in `ids` send heartbeats.
  std::vector<JobEvent> wait_alive(Duration duration, const std::vector<std::string>& ids) {
    std::vector<JobEvent> all;
    for (TimePoint end = now_ + duration; now_ < end;) {
      for (auto& event : wait(1s)) all.push_back(std::move(event));
      for (const auto& id : ids) send(NodeEvent::Kind::kAlive, id);
    }
    return all;
  }

  std::string order() const {
    std::string order;
    for (const auto& [id, assignment] : rendezvous_->assignments()) order += id;
    return order;
  }

  RendezvousOptions options_;
  TimePoint now_{1'000'000'000};
  std::optional<JobRendezvous> rendezvous_;
};

MATCHER_P(Are, kind, "") { return arg.size() == 1 && arg.front().kind == kind; }

}  // namespace muster
