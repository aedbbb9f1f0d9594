#pragma once

#include <chrono>

namespace muster::test {

/// How often this program's threads have given their cores away: yields.cpp stands in the place of sched_yield().
long yields();
/// From now on a yield takes so long, as beside a thread that computes on the same core; zero: as long as it takes.
void set_yield_time(std::chrono::nanoseconds time);

}  // namespace muster::test
