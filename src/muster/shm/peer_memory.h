#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <set>

#include "muster/shm/arena.h"
#include "muster/shm/memory_file.h"

namespace muster {

/// Maps the arena segments of other processes through /proc/<pid>/fd when they are first used. This needs the same user
/// and PID namespace, and leaves nothing behind. It checks the segment that a peer announces, because access to a
/// segment that the peer could shrink would raise SIGBUS. Not thread-safe.
class PeerMemory {
 public:
  /// The most segments that are mapped at a time. Owners free them without notice, so the least recently used mapping
  /// is dropped. No call uses as many.
  static constexpr size_t kMaxMappings = 1024;

  /// The address here of `bytes` at `location` of process `pid`, valid until kMaxMappings other segments are mapped.
  /// kUnavailable if the system does not let processes see each other's files, kProtocol for an invalid location.
  Result<uint8_t*> map(pid_t pid, const Arena::Location& location, size_t bytes);
  /// The same, but the address is valid for as long as the result is kept. Also drops the mappings of processes that
  /// have died, unless they were shared: do not mix this with map().
  Result<std::shared_ptr<uint8_t>> share(pid_t pid, const Arena::Location& location, size_t bytes);

  /// The own segments that all peers have mapped before; the last kMaxMappings of them. For a segment that is dropped
  /// from this list, the peers only confirm once more.
  bool is_known(uint64_t segment) const { return known_.contains(segment); }
  void add_known(uint64_t segment);

 private:
  struct Mapping {
    pid_t pid;
    uint64_t segment;
    size_t bytes;
    std::shared_ptr<uint8_t[]> memory;
  };
  Result<const Mapping*> find(pid_t pid, const Arena::Location& location, size_t bytes);
  static Result<Mapping> open(pid_t pid, const Arena::Location& location);

  std::list<Mapping> mappings_;  ///< the least recently used first
  std::set<uint64_t> known_;
  std::deque<uint64_t> known_order_;  ///< the segments of known_, the oldest first
};

}  // namespace muster
