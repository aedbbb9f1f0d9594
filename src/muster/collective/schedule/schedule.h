#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "muster/base/dtype.h"
#include "muster/collective/call.h"

namespace muster {

/// The buffer that a range lies in. Input and output may be the same memory: schedules are safe in place.
enum class BufferKind : uint8_t { kInput, kOutput, kScratch };

struct Range {
  BufferKind buffer = BufferKind::kOutput;
  size_t offset = 0;  ///< bytes
  size_t bytes = 0;
};

/// One step of one rank. Steps with one peer in one direction start in list order, and end in this order because links
/// are ordered. A step starts when the steps `after` and `and_after` have ended (kNone: no dependency). Both come
/// earlier in the list. A send ends when its memory may be written again. No range is empty.
struct Step {
  enum class Kind : uint8_t {
    kSend,           ///< `from` to `peer`
    kReceive,        ///< from `peer` into `to`
    kReceiveReduce,  ///< from `peer` into the scratch range `from`, then like kReduce
    kCopy,           ///< `from` to `to`
    kReduce,         ///< `from` and `with` combined into `to`, which may be `with`
  };
  static constexpr uint32_t kNone = ~0u;
  Kind kind;
  Rank peer = kNoRank;
  Range from, to;
  Range with;  ///< reductions: the operand that is already at this rank
  /// Reductions: true for `from` op `with`, false for `with` op `from`. The order is part of the schedule, because all
  /// ranks must get the same bits.
  bool from_first = false;
  uint32_t after = kNone;
  uint32_t and_after = kNone;

  bool receives() const { return kind == Kind::kReceive || kind == Kind::kReceiveReduce; }
  /// The range whose bytes the link carries, for a step with a peer.
  const Range& on_link() const { return kind == Kind::kReceive ? to : from; }
  /// Reductions: the operands in the order in which they are combined.
  const Range& first_operand() const { return from_first ? from : with; }
  const Range& second_operand() const { return from_first ? with : from; }
};

/// The steps of one rank in a collective.
struct Schedule {
  std::vector<Step> steps;
  size_t scratch_bytes = 0;
};

/// Costs of a link, by LogP with bytes (Culler et al. 1993; Alexandrov et al. 1995).
struct LinkCost {
  double latency = 15e-6;         ///< seconds from the end of a send until its bytes can be received
  double overhead = 4e-6;         ///< seconds of CPU for a message, at either end
  double bytes_per_second = 2e9;  ///< throughput of an end while it sends or receives
  friend bool operator==(const LinkCost&, const LinkCost&) = default;
};

/// The costs that the choice of an algorithm depends on.
struct CostModel {
  LinkCost link;
  double reduce_bytes_per_second = 6e9;  ///< bytes that a core combines or copies
  double load = 1;                       ///< ranks per core of their host; above 1, the ranks take turns
  friend bool operator==(const CostModel&, const CostModel&) = default;
};

struct Algorithm;  // algorithms.h

/// A collective to plan. Pure data: equal specs give equal schedules on every rank and in every run, so schedules can
/// be cached. operation.h defines input and output. A schedule writes its input only where it is also output.
struct CollectiveSpec {
  Collective collective = Collective::kBarrier;
  Rank rank = 0;
  int size = 1;
  size_t count = 0;  ///< elements of the tensor, or of one rank's block; unused if `counts` is given
  size_t element_bytes = 1;
  Rank root = 0;
  std::vector<size_t> counts, receive_counts;  ///< elements of each rank's block, if these differ (operation.h)
  size_t chunk_bytes = 1 << 18;                ///< pipelining grain of large messages, rounded down to whole elements
  CostModel costs;                             ///< the same at all ranks
  const Algorithm* algorithm = nullptr;        ///< used if it fits, at any cost (tuning.h); null: choose
};

/// The schedule of the chosen algorithm: the given one, or the fastest by predict() (cost.h).
Result<Schedule> plan(const CollectiveSpec& spec);

/// For tests and `explain`: one line per step.
std::string to_string(const Schedule& schedule);

}  // namespace muster
