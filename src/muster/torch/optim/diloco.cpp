#include "muster/torch/optim/diloco.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include "muster/torch/c10d/arguments.h"

namespace muster::optim {

std::unique_ptr<torch::optim::Optimizer> nesterov_outer(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                             torch::optim::SGDOptions(0.7).momentum(0.9).nesterov(true));
}

/// Parameters that are averaged together, and the outer optimizer's copies of them.
class DiLoCo::Fragment {
 public:
  Fragment(std::vector<at::Tensor> parameters, const MakeOuter& make) : parameters_(std::move(parameters)) {
    const at::NoGradGuard no_grad;
    int64_t count = 0;
    bool wide = false;
    for (const at::Tensor& parameter : parameters_) {
      count += parameter.numel();
      wide |= parameter.scalar_type() == at::kDouble;
    }
    const at::ScalarType dtype = wide ? at::kDouble : at::kFloat;
    difference_ = at::empty({count}, dtype);
    int64_t begin = 0;
    for (const at::Tensor& parameter : parameters_) {
      at::Tensor copy = parameter.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true);
      copy.mutable_grad() = difference_.narrow(0, begin, copy.numel()).view(copy.sizes());
      begin += copy.numel();
      copies_.push_back(std::move(copy));
    }
    outer_ = make(copies_);
  }

  void begin(c10d::CommHookInterface& hook, size_t index, size_t count) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < copies_.size(); ++i) at::sub_out(copies_[i].mutable_grad(), copies_[i], parameters_[i]);
    c10d::GradBucket bucket = bucket_of(index, count, difference_, copies_);
    pending_ = hook.runHook(bucket);
  }
  /// Waits for the average, if one is pending, and applies it.
  void finish(double merge_alpha) {
    const auto pending = std::exchange(pending_, nullptr);
    if (!pending) return;
    pending->waitAndThrow();
    const at::NoGradGuard no_grad;
    outer_->step();
    for (size_t i = 0; i < copies_.size(); ++i) {
      if (merge_alpha == 0) {
        parameters_[i].copy_(copies_[i]);
      } else {
        parameters_[i].lerp_(copies_[i].to(parameters_[i].scalar_type()), 1 - merge_alpha);
      }
    }
  }

  void save(torch::serialize::OutputArchive& archive) const {
    torch::serialize::OutputArchive outer;
    outer_->save(outer);
    archive.write("outer", outer);
    for (size_t i = 0; i < copies_.size(); ++i) archive.write(std::to_string(i), copies_[i], /*is_buffer=*/true);
  }
  void load(torch::serialize::InputArchive& archive) {
    const at::NoGradGuard no_grad;
    torch::serialize::InputArchive outer;
    archive.read("outer", outer);
    outer_->load(outer);
    for (size_t i = 0; i < copies_.size(); ++i) {
      at::Tensor saved;
      archive.read(std::to_string(i), saved, /*is_buffer=*/true);
      copies_[i].copy_(saved);
    }
  }

 private:
  std::vector<at::Tensor> parameters_, copies_;
  at::Tensor difference_;  ///< the copies' gradients, concatenated
  std::unique_ptr<torch::optim::Optimizer> outer_;
  c10::intrusive_ptr<c10::ivalue::Future> pending_;
};

namespace {

/// Splits into `parts` lists of about equal size, in order, none empty.
std::vector<std::vector<at::Tensor>> split(const std::vector<at::Tensor>& parameters, uint64_t parts) {
  uint64_t total = 0, done = 0;
  for (const at::Tensor& parameter : parameters) total += parameter.numel();
  std::vector<std::vector<at::Tensor>> lists(1);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool full = done * parts >= lists.size() * total || parameters.size() - i <= parts - lists.size();
    if (full && !lists.back().empty()) lists.emplace_back();
    lists.back().push_back(parameters[i]);
    done += parameters[i].numel();
  }
  return lists;
}

}  // namespace

DiLoCo::DiLoCo(std::shared_ptr<Group> group, torch::optim::Optimizer& inner, const DiLoCoOptions& options, Hook hook)
    : PeriodicSyncOptimizer("DiLoCo", *group, inner, options.sync_every, options.init_sync),
      delay_(options.delay),
      merge_alpha_(options.merge_alpha.value_or(options.delay > 0 ? 0.5 : 0)),
      hook_(hook != nullptr ? std::move(hook) : all_reduce_hook({group, nullptr})) {
  check_argument(options.delay < options.sync_every, "DiLoCo", "the delay must be < sync_every, got ", options.delay);
  const uint64_t max = std::min<uint64_t>(options.sync_every, parameters().size());
  check_argument(options.fragments >= 1 && options.fragments <= max, "DiLoCo", "fragments must be between 1 and ", max,
                 ", got ", options.fragments);
  for (auto& part : split(parameters(), options.fragments)) {
    fragments_.push_back(std::make_unique<Fragment>(std::move(part), options.outer));
  }
}

DiLoCo::~DiLoCo() = default;

void DiLoCo::maybe_sync() {
  for (size_t i = 0; i < fragments_.size(); ++i) {
    const uint64_t turn = i * sync_every() / fragments_.size();
    if (steps() % sync_every() == turn) fragments_[i]->begin(*hook_, i, fragments_.size());
    const bool due = (steps() + sync_every() - turn) % sync_every() == delay_;
    if (due) fragments_[i]->finish(merge_alpha_);
  }
}

void DiLoCo::finish() {
  for (const auto& fragment : fragments_) fragment->finish(merge_alpha_);
}

void DiLoCo::synchronize() {
  finish();
  for (size_t i = 0; i < fragments_.size(); ++i) fragments_[i]->begin(*hook_, i, fragments_.size());
  for (const auto& fragment : fragments_) fragment->finish(0);
}

void DiLoCo::save(torch::serialize::OutputArchive& archive) {
  finish();
  PeriodicSyncOptimizer::save(archive);
  for (size_t i = 0; i < fragments_.size(); ++i) {
    torch::serialize::OutputArchive fragment;
    fragments_[i]->save(fragment);
    archive.write(c10::str("fragment", i), fragment);
  }
}

void DiLoCo::load(torch::serialize::InputArchive& archive) {
  finish();
  PeriodicSyncOptimizer::load(archive);
  for (size_t i = 0; i < fragments_.size(); ++i) {
    torch::serialize::InputArchive fragment;
    archive.read(c10::str("fragment", i), fragment);
    fragments_[i]->load(fragment);
  }
}

}  // namespace muster::optim
