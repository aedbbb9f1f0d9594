#pragma once

#include <string>
#include <vector>

#include "muster/group/group.h"

namespace muster {

/// Infers dtype, count and layout of a submitted operation's call. kInvalidArgument for invalid arguments, as far as
/// this rank can check them alone. kUnsupported for a dtype that the reduction does not support.
Result<> validate_and_infer(Operation& operation, const GroupSpec& self);

/// kInvalidArgument unless the timeout of the group with this name is greater than zero.
Result<> check_timeout(Duration timeout, const std::string& group);

/// The total number of elements in all blocks.
size_t total(const std::vector<size_t>& counts);

/// Merges consecutive operations of one kind, as Group::submit() describes. The decision depends only on fields that
/// are equal at all ranks, so every rank merges the same operations.
std::vector<Operation> coalesce(std::vector<Operation> operations, int size);

}  // namespace muster
