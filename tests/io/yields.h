#pragma once

namespace muster::test {

/// How often this program's threads have given their cores away: yields.cpp stands in the place of sched_yield().
long yields();

}  // namespace muster::test
