#pragma once

#include "muster/collective/operation.h"

namespace muster {

// Averages and premultiplied sums on top of schedules, which only sum.

/// What this rank's input is multiplied by before it is summed; 1 for most operations.
double input_factor(const Operation& operation, int size);
/// The same operation with its input multiplied: in place if the input becomes the output, else in `copy`.
Operation scale_input(Operation operation, double factor, Rank self, Bytes& copy);
/// Turns the sum in the output into the average, if that is the operation. `factor` as before.
void finish_average(const Operation& operation, double factor, int size, Rank self);

}  // namespace muster
