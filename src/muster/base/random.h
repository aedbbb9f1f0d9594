#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace muster {

/// A seeded generator (xoshiro256**, Blackman and Vigna 2018): the same seed gives the same run. Not for secrets.
class Random {
 public:
  explicit Random(uint64_t seed);
  uint64_t next();
  /// Uniform in [0, bound); bound > 0.
  uint64_t below(uint64_t bound);
  /// Uniform in [low, high].
  uint64_t between(uint64_t low, uint64_t high) { return low + below(high - low + 1); }
  /// Uniform in [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  bool chance(double probability) { return uniform() < probability; }

 private:
  uint64_t state_[4];
};

/// Random bytes from the kernel (getrandom) for secrets, nonces and names. Aborts if it fails.
void fill_secure_random(std::span<uint8_t> out);

}  // namespace muster
