#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "muster/base/dtype.h"

namespace muster {

/// Which memory a range lies in.
enum class Place : uint8_t { kInput, kOutput, kScratch };

struct Range {
  Place place = Place::kOutput;
  size_t offset = 0;  ///< bytes
  size_t bytes = 0;
};

/// One step of one rank. Steps to one peer in one direction are started in list order; a step starts when step `after`
/// has ended (kNone: at once).
struct Step {
  enum class Kind : uint8_t {
    kSend,           ///< `from` to `peer`
    kReceive,        ///< from `peer` into `to`
    kReceiveReduce,  ///< from `peer` through scratch `from`, combined into `to`
    kCopy,           ///< `from` to `to`
    kReduce,         ///< `from` combined into `to`
  };
  static constexpr uint32_t kNone = ~0u;
  Kind kind;
  Rank peer = kNoRank;
  Range from, to;
  uint32_t after = kNone;
};

/// What one rank does in a collective.
struct Schedule {
  std::vector<Step> steps;
  size_t scratch_bytes = 0;
};

/// What is asked. Pure data: the same problem gives the same schedule on every rank and run, so it can be cached.
struct Problem {
  Rank rank = 0;
  int size = 1;
  size_t count = 0;  ///< elements; all_gather: of each rank's input
  size_t element_bytes = 1;
  Rank root = 0;                 ///< broadcast
  size_t chunk_bytes = 1 << 18;  ///< pipelining grain of large messages
};

Schedule ring_all_reduce(const Problem& problem);
/// Any rank count: the ranks beyond a power of two fold in first (Rabenseifner 2004, section 3).
Schedule recursive_doubling_all_reduce(const Problem& problem);
Schedule binomial_broadcast(const Problem& problem);
Schedule ring_all_gather(const Problem& problem);
/// Bruck et al. 1997: ceil(log2 n) rounds at any rank count.
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
