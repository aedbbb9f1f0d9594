#pragma once

#include <map>
#include <string>
#include <vector>

#include "sim/tier_sim.h"

namespace muster {

/// Simulates the start of a job over proxies. Each worker registers (a counter gives it its rank), publishes its
/// address, reads the addresses of log2(N) peers, takes part in an all-gather along a tree of keys, and passes a
/// barrier. With any faults, each worker must end with success or with an error before its deadline.
class StartUp {
 public:
  struct Options {
    TierSim::Options tiers;
    int workers_per_node = 8;
    Duration step_timeout = 60s;  ///< the timeout of each worker for each of its steps
    int tree_fanout = 32;
  };
  StartUp(Options options, uint64_t seed);

  TierSim& tiers() { return tiers_; }
  /// Runs until every worker has ended. kMismatch if the store gave a wrong answer, kTimeout if a worker hangs.
  Result<> run();

  int workers() const { return static_cast<int>(workers_.size()); }
  int succeeded() const { return succeeded_; }
  /// For each error code, the number of workers that ended with it and one of the messages.
  const std::map<ErrorCode, std::pair<int, std::string>>& failures() const { return failures_; }
  Duration took() const { return took_; }

 private:
  enum class Step : uint8_t { kRegister, kPublish, kPeers, kGather, kTable, kBarrier, kDone };
  struct Worker {
    int node = 0;
    ClientId client = 0;
    Step step = Step::kRegister;
    uint8_t level = 0;  // level of the tree
    bool wrote = false;
    int rank = -1;
    RequestId request = 0;
  };

  void begin(size_t worker);
  void ask(size_t worker, Request request);
  void on_reply(int node, const Reply& reply);
  void advance(size_t index, const Reply& reply);
  void gather(size_t index, const Reply& reply);
  Request gather_request(const Worker& worker) const;
  void end(Worker& worker, const Result<>& how);
  void broke(const std::string& what);
  Key address_key(int rank) const;
  Bytes address_of(int rank) const;
  std::vector<int> peers_of(int rank) const;
  bool leads(int rank, int level) const;
  int levels() const;

  const Options options_;
  TierSim tiers_;
  std::vector<Worker> workers_;
  std::vector<bool> rank_taken_;
  int at_barrier_ = 0, ended_ = 0, succeeded_ = 0;
  std::map<ErrorCode, std::pair<int, std::string>> failures_;
  std::string broken_;
  Duration took_{};
};

}  // namespace muster
