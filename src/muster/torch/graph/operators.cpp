#include "muster/torch/graph/operators.h"

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/torch/graph/chunked_matmul.h"
#include "muster/torch/graph/native_call.h"
#include "muster/torch/graph/operator_helpers.h"

namespace muster::graph {

c10d::ReduceOp reduce_op_of(std::string_view name) {
  if (name == "sum") return c10d::ReduceOp::SUM;
  if (name == "avg") return c10d::ReduceOp::AVG;
  if (name == "product") return c10d::ReduceOp::PRODUCT;
  if (name == "min") return c10d::ReduceOp::MIN;
  if (name == "max") return c10d::ReduceOp::MAX;
  if (name == "band") return c10d::ReduceOp::BAND;
  if (name == "bor") return c10d::ReduceOp::BOR;
  if (name == "bxor") return c10d::ReduceOp::BXOR;
  TORCH_CHECK_VALUE(false, "muster: a graph cannot reduce by \"", name,
                    "\", only by sum, avg, product, min, max, band, bor, bxor");
}

at::Tensor new_rows(const at::Tensor& like, int64_t rows) {
  std::vector<int64_t> shape = like.sizes().vec();
  shape.at(0) = rows;
  return at::empty(shape, like.options());
}

at::Tensor pending(at::Tensor output, const WorkPtr& work) {
  c10d::register_work(output, work);
  return output;
}

namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor stack_for(const at::Tensor& like, int64_t count) {
  std::vector<int64_t> shape = like.sizes().vec();
  shape.insert(shape.begin(), count);
  return at::empty(shape, like.options());
}

/// Consecutive rows of `tensor`: sizes[r] of them for rank r.
Tensors split_rows(const at::Tensor& tensor, at::IntArrayRef sizes, int group_size, const char* title) {
  TORCH_CHECK_VALUE(static_cast<int>(sizes.size()) == group_size, title, ": ", sizes.size(), " split_sizes for ",
                    group_size, " ranks");
  return tensor.split_with_sizes(sizes, 0);
}

/// Blocks: for an all_reduce whose wait would come next.
void all_reduce(const at::Tensor& tensor, std::string_view op, const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  Tensors tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op_of(op);
  options.asyncOp = false;
  const WorkPtr work = group->getBackend(tensor.device().type())->allreduce(tensors, options);
  if (work) work->wait();  // other backends than muster return one
}

/// Compiled C++ code calls this by its address, because it is not linked with muster.
void all_reduce_of_handle(AtenTensorHandle tensor, const char* op, const char* group_name) {
  all_reduce(*torch::aot_inductor::tensor_handle_to_tensor_pointer(tensor), op, group_name);
}

int64_t all_reduce_address() { return reinterpret_cast<int64_t>(&all_reduce_of_handle); }

int64_t native_call_address() { return reinterpret_cast<int64_t>(&native_call); }

at::Tensor reduce(const at::Tensor& input, const std::string& op, int64_t root, const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  Tensors output{input.clone(at::MemoryFormat::Contiguous)};
  c10d::ReduceOptions options;
  options.reduceOp = reduce_op_of(op);
  options.rootRank = root;
  return pending(output[0], group->reduce(output, options));
}

at::Tensor broadcast(const at::Tensor& input, int64_t root, const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  Tensors output{input.clone(at::MemoryFormat::Contiguous)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return pending(output[0], group->broadcast(output, options));
}

/// `rank`: this rank. Operators whose results have another shape at each rank take it. Without it, graphs that differ
/// only in these shapes would be equal, and a compiler would take one from its cache that another rank has put there.
c10::intrusive_ptr<c10d::ProcessGroup> group_of(const std::string& group_name, int64_t rank) {
  auto group = c10d::resolve_process_group(group_name);
  TORCH_CHECK_VALUE(group->getRank() == rank, "muster: the graph is compiled for rank ", rank, " of group ", group_name,
                    ", and this is rank ", group->getRank());
  return group;
}

at::Tensor gather(const at::Tensor& input, int64_t root, int64_t rank, const std::string& group_name) {
  const auto group = group_of(group_name, rank);
  const bool is_root = group->getRank() == root;
  const at::Tensor output = stack_for(input, is_root ? group->getSize() : 0);
  Tensors inputs{input.contiguous()};
  std::vector<Tensors> outputs;
  if (is_root) outputs.push_back(output.unbind());
  c10d::GatherOptions options;
  options.rootRank = root;
  return pending(output, group->gather(outputs, inputs, options));
}

at::Tensor scatter(const at::Tensor& input, int64_t root, const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  const at::Tensor output = at::empty(input.sizes().slice(1), input.options());
  Tensors outputs{output};
  std::vector<Tensors> inputs;
  if (group->getRank() == root) inputs.push_back(input.contiguous().unbind());
  c10d::ScatterOptions options;
  options.rootRank = root;
  return pending(output, group->scatter(outputs, inputs, options));
}

at::Tensor all_gather_uneven(const at::Tensor& input, at::IntArrayRef split_sizes, const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  const at::Tensor output = new_rows(input, c10::sum_integers(split_sizes));
  std::vector<Tensors> outputs{split_rows(output, split_sizes, group->getSize(), "all_gather_into_tensor_uneven")};
  Tensors inputs{input.contiguous()};
  return pending(output, group->allgather(outputs, inputs));
}

at::Tensor reduce_scatter_uneven(const at::Tensor& input, at::IntArrayRef split_sizes, const std::string& op,
                                 int64_t rank, const std::string& group_name) {
  const auto group = group_of(group_name, rank);
  std::vector<Tensors> inputs{
      split_rows(input.contiguous(), split_sizes, group->getSize(), "reduce_scatter_tensor_uneven")};
  Tensors outputs{new_rows(input, split_sizes[group->getRank()])};
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op_of(op);
  return pending(outputs[0], group->reduce_scatter(outputs, inputs, options));
}

/// The result is empty. It stands for the end of the barrier.
at::Tensor barrier(const at::Tensor& like, const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  return pending(at::empty({0}, like.options()), group->barrier());
}

/// The messages begin in this order. The result of a send is empty, and stands for its end. The number, which is not
/// used here, makes each call of a graph different: torch would make one call of two equal ones.
Tensors exchange(at::TensorList tensors, const c10::List<bool>& sends, at::IntArrayRef peers, at::IntArrayRef tags,
                 int64_t /*number*/, const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  TORCH_CHECK_VALUE(sends.size() == tensors.size() && peers.size() == tensors.size() && tags.size() == tensors.size(),
                    "muster::exchange needs a peer, a tag and a direction for each tensor");
  Tensors results;
  for (size_t i = 0; i < tensors.size(); ++i) {
    Tensors message{sends[i] ? tensors[i].contiguous() : at::empty(tensors[i].sizes(), tensors[i].options())};
    const int peer = static_cast<int>(peers[i]), tag = static_cast<int>(tags[i]);
    const WorkPtr work = sends[i] ? group->send(message, peer, tag) : group->recv(message, peer, tag);
    results.push_back(pending(sends[i] ? at::empty({0}, message[0].options()) : message[0], work));
  }
  return results;
}

}  // namespace

void define_operators() {
  static torch::Library library = [] {
    torch::Library made(torch::Library::DEF, "muster", std::nullopt, __FILE__, __LINE__);
    const auto define = [&made](const char* schema, auto kernel) {
      made.def(schema, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, kernel));
    };
    define("all_reduce_(Tensor(a!) tensor, str reduce_op, str group_name) -> ()", TORCH_FN(all_reduce));
    define("all_reduce_address() -> int", TORCH_FN(all_reduce_address));
    define("native_call_address() -> int", TORCH_FN(native_call_address));
    define("reduce(Tensor input, str reduce_op, int root, str group_name) -> Tensor", TORCH_FN(reduce));
    define("broadcast(Tensor input, int root, str group_name) -> Tensor", TORCH_FN(broadcast));
    define("gather(Tensor input, int root, int rank, str group_name) -> Tensor", TORCH_FN(gather));
    define("scatter(Tensor input, int root, str group_name) -> Tensor", TORCH_FN(scatter));
    define("all_gather_uneven(Tensor input, SymInt[] split_sizes, str group_name) -> Tensor",
           TORCH_FN(all_gather_uneven));
    define(
        "reduce_scatter_uneven(Tensor input, SymInt[] split_sizes, str reduce_op, int rank, str group_name) -> Tensor",
        TORCH_FN(reduce_scatter_uneven));
    define("barrier(Tensor like, str group_name) -> Tensor", TORCH_FN(barrier));
    define("exchange(Tensor[] tensors, bool[] sends, int[] peers, int[] tags, int number, str group_name) -> Tensor[]",
           TORCH_FN(exchange));
    define_chunked_matmul(made);
    return made;
  }();
}

}  // namespace muster::graph
