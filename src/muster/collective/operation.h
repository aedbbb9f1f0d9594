#pragma once

#include <vector>

#include "muster/collective/buffer.h"
#include "muster/collective/call.h"

namespace muster {

/// One rank's part in a collective: the call, which is equal at all ranks, and this rank's memory. For `n` ranks:
///
///   collective       input                          output
///   all_reduce       the tensor                     the same memory as input: in place
///   reduce           the tensor                     root: the same memory; elsewhere unused, and input is not changed
///   broadcast        root: the tensor               the tensor, at the root the same memory
///   all_gather       one block                      n blocks, by rank; input may be the own one of them
///   gather           one block                      root: n blocks; input may be the own one of them
///   scatter          root: n blocks                 one block; at the root it may be the own one of input
///   reduce_scatter   n blocks                       one block; it may be the own one of input, which is then changed
///   all_to_all       n blocks, by receiver          n blocks, by sender; never the same memory as input
///   barrier          -                              -
///
/// Blocks are equal, unless `counts` says otherwise.
struct Operation {
  Call call;
  BufferView input, output;
  /// Elements of each rank's block, empty when all are equal. all_gather, reduce_scatter: the same at all ranks.
  /// all_to_all: of what this rank sends to each.
  std::vector<size_t> counts;
  /// all_to_all: of what this rank receives from each; given if `counts` is.
  std::vector<size_t> receive_counts;
  /// kPremulSum: this rank's elements are first multiplied by this.
  double factor = 1;
  /// The call site (flight/call_site.h), for reports; zero: unknown.
  uint32_t site = 0;
  /// The caller's call, if this operation is a part of another one.
  const Call* parent = nullptr;

  /// The call that ranks compare and errors name.
  const Call& reported_call() const { return parent != nullptr ? *parent : call; }
};

}  // namespace muster
