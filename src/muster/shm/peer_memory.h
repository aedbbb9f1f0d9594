#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <list>
#include <set>

#include "muster/shm/arena.h"

namespace muster {

/// Other processes' arena segments, mapped here when they are first seen, through /proc/<pid>/fd: that takes the same
/// user and pid namespace, and leaves nothing behind. What a peer says of its memory is checked: a segment that it
/// could shrink would be a signal here. Not thread-safe.
class PeerMemory {
 public:
  /// Segments that are mapped at a time: their owners give them back without a word, so what was used longest ago must
  /// go some day. No call uses as many.
  static constexpr size_t kMaxMappings = 1024;

  PeerMemory() = default;
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  /// Where `bytes` at `place` of process `pid` lie here, until kMaxMappings others have been asked for. kUnavailable
  /// where the system does not let processes see each other's files, kProtocol for a place that is none.
  Result<uint8_t*> map(pid_t pid, const Arena::Location& place, size_t bytes);

  /// Of this process's own segments: those that all peers have mapped before. The last kMaxMappings of them: nobody
  /// says which are still there, and one that is forgotten is only asked about once more.
  bool is_known(uint64_t segment) const { return known_.contains(segment); }
  void add_known(uint64_t segment);

 private:
  struct Mapping {
    pid_t pid;
    uint64_t segment;
    uint8_t* base;
    size_t bytes;
  };
  static Result<Mapping> open(pid_t pid, const Arena::Location& place);

  std::list<Mapping> mappings_;  ///< what was used longest ago first; a few
  std::set<uint64_t> known_;
  std::deque<uint64_t> known_order_;  ///< the same, what was noted longest ago first
};

}  // namespace muster
