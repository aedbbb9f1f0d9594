#pragma once

#include "muster/collective/operation.h"

namespace muster {

// Averages and premultiplied sums on top of schedules, which only sum.

/// The factor by which this rank's input is multiplied before it is summed; 1 for most operations.
double input_factor(const Operation& operation, int size);
/// Returns the same operation with its input multiplied by `factor`. The input is scaled in place if the operation
/// overwrites it anyway, else in `copy`.
Operation scale_input(Operation operation, double factor, Rank self, Bytes& copy);
/// For kAverage: turns the sum in the output into the average. `factor` is the factor that the inputs were scaled by.
void finish_average(const Operation& operation, double factor, int size, Rank self);

}  // namespace muster
