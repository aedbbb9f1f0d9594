#pragma once

namespace muster::graph {

/// Defines the operators muster::*, once: collectives and messages inside graphs for which torch has no operator.
/// python/muster/graph has their shapes for tracing, and their gradients.
///
/// An operator returns at once. Its result may be used after _c10d_functional::wait_tensor, as those of torch's own
/// operators. Ranks are ranks of the group. Groups of all backends, and tensors of all devices, can be used.
void define_operators();

}  // namespace muster::graph
