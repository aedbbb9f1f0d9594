#pragma once

#include <functional>
#include <string>

#include "muster/base/random.h"
#include "store/linear_client.h"

namespace muster {

struct LinearRun {
  uint64_t seed = 1;  ///< the prefix of all keys, so that several runs may share a server
  int clients = 8;
  int calls = 100;  ///< calls of each client
  /// Makes a client, also to replace a lost one. Returns null if the store cannot be reached.
  std::function<std::unique_ptr<RecordedClient>(int client)> open;
  /// Called for some requests. It simulates a client that sends the request and dies. May be empty.
  std::function<void(const Request&)> die;
  bool barriers = true;
  bool wide = false;  ///< see RandomRequests: the server must hold no keys of other runs
};

/// Runs each client in a thread of its own. The clients send random requests for few keys, so that they compete. At the
/// end one more client, from `open(clients)`, reads the final state.
History run_clients(const LinearRun& run);

/// The values of MUSTER_SEED and MUSTER_ROUNDS, or the given values if these are not set.
uint64_t seed_or(uint64_t usual);
int rounds_or(int usual);

}  // namespace muster
