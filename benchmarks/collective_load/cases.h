#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "peer.h"

namespace muster::load {

/// What a line from the driver asks for: "VERB OPERATION BYTES REPEATS SLOTS MEMORY".
struct Request {
  std::string verb;       ///< prepare: makes memory, and checks a result; run: calls it; copy: the floor
  std::string operation;  ///< all_reduce, ...
  size_t bytes = 0;       ///< of the longer one of input and output; rounded up to equal blocks of whole elements
  long repeats = 1;
  size_t slots = 1;    ///< tensors that are used in turn
  std::string memory;  ///< ordinary, or own: what Peer::allocate() gives
};

/// Carries out requests with one peer.
class Cases {
 public:
  explicit Cases(Peer& peer) : peer_(peer) {}
  /// The line to answer with: bytes for prepare, seconds for the others; "refused" for memory that there is none of.
  std::string answer(const Request& request);

 private:
  struct Slot {
    float* input;
    float* output;
  };

  bool prepare(const Request& request);
  float* allocate(size_t count, bool own);
  void call(const std::string& operation, const Slot& slot);
  void check(const std::string& operation);
  double run(const Request& request);
  double copy(const Request& request);

  Peer& peer_;
  size_t elements_ = 0;  ///< of the longer one of input and output
  std::vector<Slot> slots_;
  std::vector<std::unique_ptr<float[]>> ordinary_;
  std::unique_ptr<float[]> copied_;
};

}  // namespace muster::load
