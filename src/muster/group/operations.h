#pragma once

#include <vector>

#include "muster/group/group.h"

namespace muster {

/// Infers dtype, count and layout of a submitted operation's call. kInvalidArgument for arguments that this rank can
/// see to be invalid, kUnsupported for a dtype that the reduction does not support.
Result<> validate_and_infer(Operation& operation, const GroupSpec& self);

/// Elements of all blocks together.
size_t total(const std::vector<size_t>& counts);

/// Merges consecutive operations of one kind: see Group::submit(). Whether two can be merged depends only on what all
/// ranks agree on, so every rank merges the same operations.
std::vector<Operation> coalesce(std::vector<Operation> operations, int size);

}  // namespace muster
