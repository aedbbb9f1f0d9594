#pragma once

#include <vector>

#include "muster/group/group.h"

namespace muster {

/// Fills in what a submitted operation leaves open: dtype, count and layout of its call. kInvalidArgument for what this
/// rank can see to be wrong, kUnsupported for a dtype that the reduction does not take.
Result<> complete(Operation& operation, const GroupSpec& self);

/// Elements of all blocks together.
size_t total(const std::vector<size_t>& counts);

/// Complete operations with those of one kind that follow each other merged: see Group::submit(). What ranks agree on
/// in each call they agree on in all of them, so every rank merges alike.
std::vector<Operation> coalesce(std::vector<Operation> operations, int size);

}  // namespace muster
