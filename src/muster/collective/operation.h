#pragma once

#include <vector>

#include "muster/collective/buffer.h"
#include "muster/collective/call.h"
#include "muster/collective/staging.h"

namespace muster {

/// One rank's part in a collective: the call, which is equal at all ranks, and this rank's memory. For `n` ranks:
///
///   collective       input                          output
///   all_reduce       the tensor                     the same memory as input: in place
///   reduce           the tensor                     root: the same memory; elsewhere unused, and input is not changed
///   broadcast        root: the tensor               the tensor, at the root the same memory
///   all_gather       one block                      n blocks, by rank; input may be this rank's block in it
///   gather           one block                      root: n blocks; input may be this rank's block in it
///   scatter          root: n blocks                 one block; at the root it may be its block in input
///   reduce_scatter   n blocks                       one block; may be this rank's block in input, which then changes
///   all_to_all       n blocks, by receiver          n blocks, by sender; never the same memory as input
///   barrier          -                              -
///
/// Blocks are equal, unless `counts` says otherwise.
struct Operation {
  Call call;
  BufferView input, output;
  /// The number of elements of each rank's block; empty if all blocks are equal. For all_gather and reduce_scatter,
  /// they are the same at all ranks. For all_to_all, they count the elements that this rank sends to each rank.
  std::vector<size_t> counts;
  /// For all_to_all: the elements that this rank receives from each rank; given if `counts` is given.
  std::vector<size_t> receive_counts;
  /// kPremulSum: this rank's elements are first multiplied by this factor.
  double factor = 1;
  /// The call site (flight/call_site.h), for reports; zero: unknown.
  uint32_t site = 0;
  /// The caller's call, if this operation is a part of another one.
  const Call* parent = nullptr;
  /// For all_reduce, if its memory is copied from and to a device while the operation runs. Must live until it ends.
  Staging* staging = nullptr;

  /// Waits until the input is there, up to byte `end`.
  Result<> wait_for_input(size_t end, const Deadline& deadline) const {
    return staging != nullptr ? staging->wait_for_input(end, deadline) : Result<>{};
  }

  /// The call that ranks compare and errors name.
  const Call& reported_call() const { return parent != nullptr ? *parent : call; }
};

}  // namespace muster
