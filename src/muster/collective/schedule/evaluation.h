#pragma once

#include <span>

#include "muster/collective/schedule/schedule.h"

namespace muster {

/// Seconds that the schedules of all ranks take if all ranks begin together. Simulates every step of every rank; a rank
/// works on one step at a time. predict() (cost.h) estimates the same time by a formula.
double evaluate(std::span<const Schedule> schedules, const CostModel& costs);

}  // namespace muster
