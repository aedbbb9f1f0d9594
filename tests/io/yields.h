#pragma once

#include <chrono>

namespace muster::test {

/// The number of yields of this program's threads so far. yields.cpp replaces sched_yield().
long yields();
/// Makes each later yield take this long, as it does beside a busy thread on the same core. Zero restores real yields.
void set_yield_time(std::chrono::nanoseconds time);

}  // namespace muster::test
