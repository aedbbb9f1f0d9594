#pragma once

#include <span>

#include "muster/collective/schedule/schedule.h"

namespace muster {

/// Seconds that the schedules of all ranks take together over the network, all beginning at once: every step of every
/// rank is played through, each rank doing one thing at a time. What predict() (cost.h) estimates without doing so.
double evaluate(std::span<const Schedule> schedules, const Network& network);

}  // namespace muster
