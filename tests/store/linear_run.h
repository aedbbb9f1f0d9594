#pragma once

#include <functional>
#include <string>

#include "muster/base/random.h"
#include "store/linear_client.h"

namespace muster {

struct LinearRun {
  uint64_t seed = 1;  ///< keys begin with it, so that several runs may share a server
  int clients = 8;
  int calls = 100;  ///< of each client
  /// A client, new or in the place of one that was lost; null if there is no reaching the store.
  std::function<std::unique_ptr<RecordedClient>(int client)> open;
  /// Called for some requests: a client that asks for it and dies. May be empty.
  std::function<void(const Request&)> die;
  bool barriers = true;
  bool wide = false;  ///< see Whims: the server must hold no keys of other runs
};

/// Clients in threads of their own ask at random for what the store can do, on few keys, so that they meet. At the end
/// one more client, from `open(clients)`, looks at what is left.
History run_clients(const LinearRun& run);

/// From MUSTER_SEED, MUSTER_ROUNDS, or what is given.
uint64_t seed_or(uint64_t usual);
int rounds_or(int usual);

}  // namespace muster
