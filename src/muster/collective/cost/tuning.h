#pragma once

#include <array>
#include <string>
#include <string_view>

#include "muster/collective/algorithms/algorithms.h"

namespace muster {

/// Costs of ranks that share a host's memory (host_plan.h).
struct MemoryCosts {
  double wait = 0.2e-6;                   ///< seconds of a step in which two ranks, each on a core, wait for each other
  double turn = 4e-6;                     ///< seconds of a step for each of the ranks that share a core
  double cached_bytes_per_second = 2e10;  ///< copied between a tensor in caches and a slot
  double bytes_per_second = 8e9;          ///< the same for a tensor in memory
  bool measured = false;                  ///< false: these are guesses
  friend bool operator==(const MemoryCosts&, const MemoryCosts&) = default;
};
/// Bytes of a rank's tensors at which the two speeds apply. Between them, the speed is interpolated.
inline constexpr double kCachedTensors = 4 << 20, kUncachedTensors = 128 << 20;

/// Costs of a machine, for the choice of algorithms. `muster tune` measures them and writes them to a file of the user.
struct MachineCosts {
  LinkCost tcp, local, shm;  ///< local: Unix sockets
  MemoryCosts memory;
  double reduce_bytes_per_second = 6e9;
  int cores = 2;
  bool measured = false;  ///< false: these are guesses
  friend bool operator==(const MachineCosts&, const MachineCosts&) = default;
};

/// The costs of a machine, and the algorithms that the user asks for. Equal at all ranks of a group: rank 0 encodes its
/// own, and the other ranks decode it.
struct Tuning {
  MachineCosts machine;
  std::array<const Algorithm*, kCollectiveCount> wanted{};  ///< by collective; null: choose

  /// Sets `spec.costs` and `spec.algorithm` for links of this kind ("tcp", "unix", "shm") and this number of ranks on a
  /// host.
  void apply(CollectiveSpec& spec, std::string_view kind, int ranks_per_host) const;
  /// Some 600 bytes of JSON.
  std::string encode() const;
  /// kProtocol for text that encode() did not write.
  static Result<Tuning> decode(std::string_view text);
};

/// The measured costs of this machine, or a guess, and MUSTER_ALGO, as in "all_reduce=ring,broadcast=chain". An unknown
/// name there is kInvalidArgument.
Result<Tuning> load_tuning();
/// The algorithms that the text of MUSTER_ALGO asks for.
Result<std::array<const Algorithm*, kCollectiveCount>> parse_wanted(std::string_view text);

/// The path of this host's record: under $XDG_CACHE_HOME, else ~/.cache. Empty if neither is known.
std::string machine_path();
/// Writes the record. A rename replaces the old file, so a reader never sees a part of a file.
Result<> save_machine(const MachineCosts& machine);

}  // namespace muster
