#pragma once

#include <cstddef>
#include <vector>

#include "muster/base/clock.h"

namespace muster::bench {

double median(std::vector<double> values);
/// Microseconds of a round trip of `bytes` through a Unix socket between two processes that block in read(). `pause`:
/// between two round trips, for which both sides sleep.
double socket_round_trip(size_t bytes, int rounds, Duration pause);
/// Microseconds to copy `bytes` twice in memory that is not in a cache: what an echo moves at the least.
double copy_twice(size_t bytes, int rounds);

}  // namespace muster::bench
