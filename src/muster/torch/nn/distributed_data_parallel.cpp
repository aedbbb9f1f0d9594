#include "muster/torch/nn/distributed_data_parallel.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "muster/torch/c10d/arguments.h"
#include "muster/torch/collectives.h"

namespace muster::nn {
namespace {

constexpr const char* kTitle = "DistributedDataParallel";

size_t bytes_of_mb(double mb) {
  check_argument(mb > 0, kTitle, "bucket_cap_mb must be > 0, got ", mb);
  return static_cast<size_t>(std::ceil(mb * (1 << 20)));
}

class FunctionHook : public c10d::CppCommHookInterface<DistributedDataParallelBase::Hook> {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override { return state_(bucket); }
};

/// The tensors of the module. A tensor that modules share is listed once.
NamedTensors distinct(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  NamedTensors result;
  std::set<const void*> seen;
  for (const auto& item : tensors) {
    const at::Tensor& tensor = item.value();
    if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) result.emplace_back(item.key(), tensor);
  }
  return result;
}

/// The parameters with sparse gradients: weights of embeddings with sparse=true.
std::set<const void*> sparse_parameters(const torch::nn::Module& module) {
  std::set<const void*> found;
  const auto add = [&found](const auto* embedding) {
    if (embedding != nullptr && embedding->options.sparse()) found.insert(embedding->weight.unsafeGetTensorImpl());
  };
  module.apply([&add](const torch::nn::Module& part) {
    add(dynamic_cast<const torch::nn::EmbeddingImpl*>(&part));
    add(dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&part));
  });
  return found;
}

std::unique_ptr<muster::Reducer> make_reducer(const torch::nn::Module& module, const std::shared_ptr<Group>& group,
                                              const DistributedDataParallelOptions& options) {
  std::vector<at::Tensor> parameters;
  ReducerOptions reducer;
  const auto sparse = sparse_parameters(module);
  reducer.model_parameters = distinct(module.named_parameters());
  reducer.model_buffers = distinct(module.named_buffers());
  for (const auto& [name, parameter] : reducer.model_parameters) {
    if (!parameter.requires_grad()) continue;
    reducer.names.push_back(name);
    reducer.sparse.push_back(sparse.count(parameter.unsafeGetTensorImpl()) > 0);
    parameters.push_back(parameter);
  }
  check_argument(!parameters.empty(), kTitle,
                 "no parameter of the module requires a gradient, so it needs no DistributedDataParallel");
  reducer.bucket_bytes = bytes_of_mb(options.bucket_cap_mb);
  reducer.first_bucket_bytes = bytes_of_mb(std::min(options.first_bucket_mb, options.bucket_cap_mb));
  for (const double mb : options.bucket_cap_mb_list) reducer.bucket_bytes_list.push_back(bytes_of_mb(mb));
  reducer.gradient_as_bucket_view = options.gradient_as_bucket_view;
  reducer.find_unused_parameters = options.find_unused_parameters;
  reducer.static_graph = options.static_graph;
  reducer.verify = options.init_sync;
  reducer.device_group = options.device_group;
  reducer.skip_all_reduce_unused_parameters = options.skip_all_reduce_unused_parameters;
  return std::make_unique<muster::Reducer>(group, std::move(parameters), std::move(reducer));
}

}  // namespace

DistributedDataParallelBase::DistributedDataParallelBase(std::shared_ptr<torch::nn::Module> module,
                                                         std::shared_ptr<Group> group,
                                                         DistributedDataParallelOptions options)
    : torch::nn::Module("DistributedDataParallel"), group_(std::move(group)), options_(std::move(options)) {
  check_argument(module != nullptr && group_ != nullptr, kTitle, "the module or the group is null");
  register_module("module", module);
  reducer_ = make_reducer(*module, group_, options_);  // compares the modules of all ranks
  for (auto& [name, buffer] : distinct(module->named_buffers())) buffers_to_sync_.push_back(buffer);
  if (!options_.init_sync) return;
  std::vector<at::Tensor> state = buffers_to_sync_;
  for (auto& [name, parameter] : distinct(module->named_parameters())) state.push_back(parameter);
  broadcast(*group_, state);
}

bool DistributedDataParallelBase::will_reduce() const { return synchronizes_ && at::GradMode::is_enabled(); }

void DistributedDataParallelBase::before_forward() {
  if (joining_) join_exchange(will_reduce() ? Step::kBackward : Step::kForward);
  begin_step(will_reduce());
}

void DistributedDataParallelBase::begin_step(bool reduces) {
  if (reduces) {
    reducer_->prepare_for_forward();
    reducer_->rebuild_buckets();
  }
  if (options_.broadcast_buffers && buffers_are_stale_) broadcast(*group_, buffers_to_sync_, buffer_root_);
}

void DistributedDataParallelBase::after_forward(const std::vector<at::Tensor>& outputs, bool outputs_known) {
  buffers_are_stale_ = will_reduce();
  if (!buffers_are_stale_) return;
  const bool search = options_.find_unused_parameters || options_.static_graph;
  check_argument(!search || outputs_known, kTitle,
                 "find_unused_parameters and static_graph cannot find the tensors in the result of forward: specialize "
                 "muster::nn::TensorsIn for its type");
  reducer_->prepare_for_backward(search ? outputs : std::vector<at::Tensor>());
}

/// Exchanges the next steps of all ranks in join(). Returns their maximum.
DistributedDataParallelBase::Step DistributedDataParallelBase::join_exchange(Step mine) {
  std::vector<Step> all(static_cast<size_t>(group_->membership().size));
  value_or_throw(group_->all_gather({&mine, 1, Dtype::kUint8}, {all.data(), all.size(), Dtype::kUint8}).wait());
  const auto first = std::find_if(all.begin(), all.end(), [](Step step) { return step != Step::kNone; });
  if (first == all.end()) return Step::kNone;
  buffer_root_ = static_cast<Rank>(first - all.begin());
  const Step most = *std::max_element(all.begin(), all.end());
  if (most == Step::kBackward && !joining_->divide_by_initial_world_size) {
    reducer_->divide_once_by(static_cast<int>(all.size()) -
                             static_cast<int>(std::count(all.begin(), all.end(), Step::kNone)));
  }
  return most;
}

void DistributedDataParallelBase::join(const std::function<void()>& train, const std::function<void()>& update,
                                       JoinOptions options) {
  check_argument(train && update, kTitle, "join() needs both `train` and `update`");
  check_argument(
      !options_.skip_all_reduce_unused_parameters, kTitle,
      "join() does not support skip_all_reduce_unused_parameters: a rank without data does not know what the "
      "others skip");
  joining_ = options;
  const auto leave = c10::make_scope_exit([this] {
    joining_.reset();
    buffer_root_ = 0;
  });
  train();
  for (Step step = join_exchange(Step::kNone); step != Step::kNone; step = join_exchange(Step::kNone)) {
    const bool reduces = step == Step::kBackward;
    begin_step(reduces);
    buffers_are_stale_ = reduces;
    if (!reduces) continue;
    reducer_->shadow_backward();
    update();
  }
  // The root is a rank that had data in the last step.
  if (options_.broadcast_buffers) broadcast(*group_, buffers_to_sync_, buffer_root_);
}

void DistributedDataParallelBase::register_comm_hook(Hook hook) {
  register_comm_hook(std::make_unique<FunctionHook>(std::move(hook)));
}
void DistributedDataParallelBase::register_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  reducer_->set_hook(std::move(hook));
}

std::shared_ptr<torch::nn::Module> DistributedDataParallelBase::clone(const std::optional<at::Device>&) const {
  throw_error(
      {ErrorCode::kUnsupported,
       "a DistributedDataParallel cannot be cloned, because its buckets belong to one module: clone the wrapped "
       "module, ddp.module(), and wrap the copy"});
}

}  // namespace muster::nn
