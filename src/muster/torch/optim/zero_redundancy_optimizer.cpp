#include "muster/torch/optim/zero_redundancy_optimizer.h"

#include <ATen/ATen.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <map>

#include "muster/torch/archive_exchange.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/c10d/tensor_request.h"
#include "muster/torch/nn/clip_grad.h"
#include "muster/torch/optim/partition.h"

namespace muster::optim {

ShardedOptimizer::ShardedOptimizer(std::shared_ptr<Group> group, Groups groups,
                                   std::unique_ptr<torch::optim::OptimizerOptions> defaults, Make make)
    : torch::optim::Optimizer(groups, std::move(defaults)), group_(std::move(group)), make_(std::move(make)) {
  check_argument(group_ != nullptr, "ZeroRedundancyOptimizer", "the group is null");
  loads_.resize(static_cast<size_t>(group_->membership().size));
  assign_new_parameters();
}

void ShardedOptimizer::assign_new_parameters() {
  bool grown = local_ == nullptr;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const std::vector<at::Tensor>& parameters = param_groups_[g].params();
    if (g == owners_.size()) owners_.emplace_back();
    const size_t known = owners_[g].size();
    std::vector<size_t> sizes;
    for (size_t i = known; i < parameters.size(); ++i) sizes.push_back(parameters[i].nbytes());
    const std::vector<Rank> owners = partition(sizes, loads_);
    owners_[g].insert(owners_[g].end(), owners.begin(), owners.end());
    grown = grown || !sizes.empty();
  }
  if (!grown) return;
  std::unique_ptr<torch::optim::Optimizer> next = make_(groups_of(group_->membership().rank));
  if (local_) {
    for (auto& [parameter, state] : local_->state()) next->state()[parameter] = std::move(state);
  }
  local_ = std::move(next);
}

ShardedOptimizer::Groups ShardedOptimizer::groups_of(Rank rank) const {
  Groups groups;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    std::vector<at::Tensor> own;
    for (size_t i = 0; i < owners_[g].size(); ++i) {
      if (owners_[g][i] == rank) own.push_back(param_groups_[g].params()[i]);
    }
    groups.emplace_back(std::move(own), param_groups_[g].options().clone());
  }
  return groups;
}

std::vector<at::Tensor> ShardedOptimizer::own_parameters() {
  assign_new_parameters();
  std::vector<at::Tensor> own;
  for (const auto& group : local_->param_groups()) own.insert(own.end(), group.params().begin(), group.params().end());
  return own;
}

void ShardedOptimizer::copy_options() {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    local_->param_groups()[g].set_options(param_groups_[g].options().clone());
  }
}

at::Tensor ShardedOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  assign_new_parameters();
  copy_options();
  local_->step();
  exchange_parameters();
  return loss;
}

void ShardedOptimizer::exchange_parameters() {
  const at::NoGradGuard no_grad;
  const auto [self, size] = std::pair{group_->membership().rank, group_->membership().size};
  // By dtype, then by owner. The map is ordered, so that all ranks exchange the dtypes in the same order.
  std::map<at::ScalarType, std::vector<std::vector<at::Tensor>>> blocks;
  for (size_t g = 0; g < owners_.size(); ++g) {
    for (size_t i = 0; i < owners_[g].size(); ++i) {
      const at::Tensor& parameter = param_groups_[g].params()[i];
      auto& of_dtype = blocks[parameter.scalar_type()];
      of_dtype.resize(static_cast<size_t>(size));
      of_dtype[static_cast<size_t>(owners_[g][i])].push_back(parameter.detach());
    }
  }
  for (auto& [dtype, by_owner] : blocks) {
    TensorRequest request(c10d::OpType::UNKNOWN, "ZeroRedundancyOptimizer::step", /*async=*/false);
    const BufferView input = request.read(by_owner[static_cast<size_t>(self)]);
    std::vector<at::Tensor> all;
    std::vector<size_t> counts;
    for (const auto& block : by_owner) {
      counts.push_back(0);
      for (const at::Tensor& parameter : block) counts.back() += static_cast<size_t>(parameter.numel());
      all.insert(all.end(), block.begin(), block.end());
    }
    value_or_throw(group_->all_gather(input, request.write(all), {}, std::move(counts)).wait());
    request.copy_back();
  }
}

double ShardedOptimizer::clip_grad_norm_(double max_norm, double norm_type, bool error_if_nonfinite) {
  return nn::clip_grad_norm_(*group_, own_parameters(), max_norm, norm_type, error_if_nonfinite);
}

std::unique_ptr<torch::optim::Optimizer> ShardedOptimizer::consolidate(Rank dst) {
  at::Tensor share;
  const std::string problem = error_message_of([&] {
    assign_new_parameters();
    copy_options();
    torch::serialize::OutputArchive mine;
    local_->save(mine);
    share = to_bytes(mine);
  });
  throw_if_any_failed(*group_, problem.empty() ? problem : "could not save its share of the optimizer: " + problem);
  const std::vector<at::Tensor> all = gather_bytes(*group_, share, dst);
  if (group_->membership().rank != dst) return nullptr;
  auto whole = make_(param_groups_);
  for (Rank rank = 0; rank < group_->membership().size; ++rank) {
    const auto part = make_(groups_of(rank));
    auto archive = from_bytes(all[static_cast<size_t>(rank)]);
    part->load(archive);
    for (auto& [parameter, state] : part->state()) whole->state()[parameter] = std::move(state);
  }
  return whole;
}

void ShardedOptimizer::load(torch::serialize::InputArchive& archive) {
  assign_new_parameters();
  const auto whole = make_(param_groups_);
  whole->load(archive);
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    param_groups_[g].set_options(whole->param_groups()[g].options().clone());
  }
  local_->state().clear();
  for (const at::Tensor& parameter : own_parameters()) {
    const auto found = whole->state().find(parameter.unsafeGetTensorImpl());
    if (found != whole->state().end()) local_->state()[found->first] = std::move(found->second);
  }
}

void ShardedOptimizer::save(torch::serialize::OutputArchive&) const {
  check_argument(false, "ZeroRedundancyOptimizer::save",
                 "this rank has only its share of the state: call consolidate() at all ranks and save its result at "
                 "rank 0, or use muster::checkpoint::save");
}

}  // namespace muster::optim
