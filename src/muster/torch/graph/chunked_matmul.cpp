#include "muster/torch/graph/chunked_matmul.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "muster/torch/c10d/torch_versions.h"
#include "muster/torch/graph/operator_helpers.h"

namespace muster::graph {
namespace {

using Bias = std::optional<at::Tensor>;

/// Calls `chunk` with the first and the end row of each of `count` chunks, which differ by one row at most.
void for_each_chunk(int64_t rows, int64_t count, const std::function<void(int64_t begin, int64_t end)>& chunk) {
  TORCH_CHECK_VALUE(count > 0 && count <= rows, "muster: cannot cut ", rows, " rows into ", count, " chunks");
  for (int64_t i = 0; i < count; ++i) chunk(rows * i / count, rows * (i + 1) / count);
}

/// Rows `begin` to `end` of each rank's part of float[ranks * rows, width]: float[ranks, end - begin, width].
at::Tensor rows_of_each(const at::Tensor& whole, int64_t ranks, int64_t begin, int64_t end) {
  return whole.unflatten(0, {ranks, -1}).slice(1, begin, end);
}

void multiply(at::Tensor& product, const at::Tensor& rows, const at::Tensor& weights, const Bias& bias) {
  if (bias) {
    at::addmm_out(product, *bias, rows, weights);
  } else {
    at::mm_out(product, rows, weights);
  }
}

WorkPtr begin_gather(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
#if MUSTER_TORCH_GROUP_HAS_SINGLE
  return group.all_gather_single(output, input);
#else
  return group._allgather_base(output, input);
#endif
}

WorkPtr begin_reduce_scatter(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options) {
#if MUSTER_TORCH_GROUP_HAS_SINGLE
  return group.reduce_scatter_single(output, input, options);
#else
  return group._reduce_scatter_base(output, input, options);
#endif
}

at::Tensor new_product(const at::Tensor& like, int64_t rows, const at::Tensor& weights) {
  return at::empty({rows, weights.size(1)}, like.options());
}

c10::intrusive_ptr<c10d::ProcessGroup> group_of_size(const std::string& name, int64_t ranks) {
  auto group = c10d::resolve_process_group(name);
  TORCH_CHECK_VALUE(group->getSize() == ranks, "muster: the graph is compiled for ", ranks, " ranks of group ", name,
                    ", which has ", group->getSize());
  return group;
}

at::Tensor matmul_all_reduce(const at::Tensor& rows, const at::Tensor& weights, const Bias& bias,
                             const std::string& reduce_op, int64_t chunks, const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op_of(reduce_op);
  at::Tensor output = new_product(rows, rows.size(0), weights);
  for_each_chunk(rows.size(0), chunks, [&](int64_t begin, int64_t end) {
    std::vector<at::Tensor> chunk{output.slice(0, begin, end)};
    multiply(chunk[0], rows.slice(0, begin, end), weights, bias);
    pending(output, group->allreduce(chunk, options));
  });
  return output;
}

at::Tensor matmul_reduce_scatter(const at::Tensor& rows, const at::Tensor& weights, const Bias& bias,
                                 const std::string& reduce_op, int64_t ranks, int64_t chunks,
                                 const std::string& group_name) {
  const auto group = group_of_size(group_name, ranks);
  const int64_t own_rows = rows.size(0) / ranks;
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op_of(reduce_op);
  at::Tensor output = new_product(rows, own_rows, weights);
  for_each_chunk(own_rows, chunks, [&](int64_t begin, int64_t end) {
    at::Tensor product = new_product(rows, ranks * (end - begin), weights);
    multiply(product, rows_of_each(rows, ranks, begin, end).reshape({product.size(0), -1}), weights, bias);
    at::Tensor chunk = output.slice(0, begin, end);
    pending(output, begin_reduce_scatter(*group, chunk, product, options));
  });
  return output;
}

/// The messages of all_gather_chunks(), by the memory that they write. torch's registry would wait for all at once.
class PendingChunks {
 public:
  void put(const at::Tensor& gathered, std::vector<WorkPtr> works) {
    const std::lock_guard lock(mutex_);
    works_[gathered.const_data_ptr()] = std::move(works);
  }
  std::vector<WorkPtr> take(const at::Tensor& gathered) {
    const std::lock_guard lock(mutex_);
    auto found = works_.extract(gathered.const_data_ptr());
    TORCH_CHECK(found, "muster: these rows are not from all_gather_chunks, or were multiplied before");
    return std::move(found.mapped());
  }

 private:
  std::mutex mutex_;
  std::map<const void*, std::vector<WorkPtr>> works_;
};

PendingChunks& pending_chunks() {
  static auto* const all = new PendingChunks;  // never destroyed: the works may belong to a group that is gone
  return *all;
}

/// Chunk after chunk; a chunk has some rows of each rank. Only chunks_matmul() may read it.
at::Tensor all_gather_chunks(const at::Tensor& own_rows, int64_t ranks, int64_t chunks, const std::string& group_name) {
  const auto group = group_of_size(group_name, ranks);
  const at::Tensor input = own_rows.contiguous();
  const at::Tensor gathered = new_rows(input, ranks * input.size(0));
  std::vector<WorkPtr> works;
  for_each_chunk(input.size(0), chunks, [&](int64_t begin, int64_t end) {
    at::Tensor output = gathered.slice(0, ranks * begin, ranks * end);
    at::Tensor chunk = input.slice(0, begin, end);
    works.push_back(begin_gather(*group, output, chunk));
  });
  pending_chunks().put(gathered, std::move(works));
  return gathered;
}

/// The products of the rows that all_gather_chunks() gathers, in the order of ranks, and, if `whole`, these rows. The
/// messages read `own_rows`: a compiler keeps its memory for this operator.
std::vector<at::Tensor> chunks_matmul(const at::Tensor& gathered, const at::Tensor& own_rows, int64_t chunks,
                                      at::TensorList weights, const c10::List<Bias>& biases, bool whole) {
  const std::vector<WorkPtr> works = pending_chunks().take(gathered);
  const int64_t rows = own_rows.size(0), all_rows = gathered.size(0), ranks = all_rows / rows;
  TORCH_CHECK(static_cast<int64_t>(works.size()) == chunks, "muster: ", works.size(), " chunks were gathered, not ",
              chunks);
  std::vector<at::Tensor> results;
  for (const at::Tensor& each : weights) results.push_back(new_product(own_rows, all_rows, each));
  if (whole) results.push_back(new_rows(own_rows, all_rows));
  for_each_chunk(rows, chunks, [&, next = works.begin()](int64_t begin, int64_t end) mutable {
    (*next++)->wait();
    const at::Tensor chunk = gathered.slice(0, ranks * begin, ranks * end);
    const auto put = [&](const at::Tensor& result, const at::Tensor& part) {
      rows_of_each(result, ranks, begin, end).copy_(part.unflatten(0, {ranks, -1}));
    };
    for (size_t i = 0; i < weights.size(); ++i) {
      at::Tensor product = new_product(own_rows, chunk.size(0), weights[i]);
      multiply(product, chunk, weights[i], biases[i]);
      put(results[i], product);
    }
    if (whole) put(results.back(), chunk);
  });
  return results;
}

}  // namespace

void define_chunked_matmul(torch::Library& library) {
  const auto define = [&library](const char* schema, auto kernel) {
    library.def(schema, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, kernel));
  };
  define(
      "matmul_all_reduce(Tensor rows, Tensor weights, Tensor? bias, str reduce_op, int chunks, str group_name) "
      "-> Tensor",
      TORCH_FN(matmul_all_reduce));
  define(
      "matmul_reduce_scatter(Tensor rows, Tensor weights, Tensor? bias, str reduce_op, int ranks, int chunks, "
      "str group_name) "
      "-> Tensor",
      TORCH_FN(matmul_reduce_scatter));
  define("all_gather_chunks(Tensor own_rows, int ranks, int chunks, str group_name) -> Tensor",
         TORCH_FN(all_gather_chunks));
  define(
      "chunks_matmul(Tensor gathered, Tensor own_rows, int chunks, Tensor[] weights, Tensor?[] biases, bool whole) "
      "-> Tensor[]",
      TORCH_FN(chunks_matmul));
}

}  // namespace muster::graph
