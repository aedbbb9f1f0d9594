#pragma once

#include <torch/library.h>

namespace muster::graph {

/// Adds the operators that multiply matrices and send them in chunks of rows: one chunk is on the wire while another
/// one is computed (asynchronous tensor parallelism). python/muster/graph/_rewrite/chunks.py puts them into graphs.
///
///     matmul_all_reduce        all_reduce(rows @ weights)
///     matmul_reduce_scatter    reduce_scatter(rows @ weights)
///     all_gather_chunks        begins to gather the rows of all ranks
///     chunks_matmul            multiplies each chunk of them as soon as it has arrived
void define_chunked_matmul(torch::Library& library);

}  // namespace muster::graph
