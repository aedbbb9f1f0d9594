#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "muster/base/dtype.h"
#include "muster/collective/call.h"

namespace muster {

/// Which memory a range lies in. Input and output may be the same memory: schedules are safe in place.
enum class Place : uint8_t { kInput, kOutput, kScratch };

struct Range {
  Place place = Place::kOutput;
  size_t offset = 0;  ///< bytes
  size_t bytes = 0;
};

/// One step of one rank. Steps to one peer in one direction are started in list order; a step starts when the steps
/// `after` and `and_after` have ended (kNone: nothing to wait for). Both come earlier in the list. A send ends when its
/// memory may be written again.
struct Step {
  enum class Kind : uint8_t {
    kSend,           ///< `from` to `peer`
    kReceive,        ///< from `peer` into `to`
    kReceiveReduce,  ///< from `peer` through scratch `from`, then as kReduce
    kCopy,           ///< `from` to `to`
    kReduce,         ///< `from` and `with` combined into `to`, which may be `with`
  };
  static constexpr uint32_t kNone = ~0u;
  Kind kind;
  Rank peer = kNoRank;
  Range from, to;
  Range with;  ///< reductions: the operand that was here already
  bool from_first =
      false;  ///< reductions: `from` op `with` rather than `with` op `from`; all ranks must agree bit by bit
  uint32_t after = kNone;
  uint32_t and_after = kNone;
};

/// What one rank does in a collective.
struct Schedule {
  std::vector<Step> steps;
  size_t scratch_bytes = 0;
};

/// What is asked. Pure data: the same problem gives the same schedule on every rank and run, so it can be cached.
/// Input and output are those of operation.h, which says what lies where.
struct Problem {
  Collective collective = Collective::kBarrier;
  Rank rank = 0;
  int size = 1;
  size_t count = 0;  ///< elements of the tensor, or of one rank's block; unused where `counts` is given
  size_t element_bytes = 1;
  Rank root = 0;
  std::vector<size_t> counts, receive_counts;  ///< elements of the ranks' blocks, where these differ: see operation.h
  size_t chunk_bytes = 1 << 18;                ///< pipelining grain of large messages, rounded down to whole elements
};

/// The best schedule known for the problem. kUnsupported for a collective that has none.
Result<Schedule> plan(const Problem& problem);

/// Ring reduce-scatter, then ring all-gather, in chunks (Patarasuk and Yuan 2009): 2 (n - 1) / n of the bytes each way.
Schedule ring_all_reduce(const Problem& problem);
/// Any rank count: the ranks beyond a power of two fold in first (Rabenseifner 2004, section 3).
Schedule recursive_doubling_all_reduce(const Problem& problem);
/// In chunks: a rank passes on what it has while the rest is still coming.
Schedule binomial_broadcast(const Problem& problem);
Schedule ring_all_gather(const Problem& problem);
/// Bruck et al. 1997: ceil(log2 n) rounds at any rank count. Blocks are received where they belong, without the final
/// rotation of the paper.
Schedule bruck_all_gather(const Problem& problem);
/// Dissemination barrier (Hensgen et al. 1988): ceil(log2 n) rounds of one byte.
Schedule dissemination_barrier(const Problem& problem);

/// Picks by size and rank count; the same on every rank.
Schedule choose_all_reduce(const Problem& problem);
Schedule choose_broadcast(const Problem& problem);
Schedule choose_all_gather(const Problem& problem);

/// For tests and `explain`: one line a step.
std::string to_string(const Schedule& schedule);

}  // namespace muster
