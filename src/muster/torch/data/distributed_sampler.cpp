#include "muster/torch/data/distributed_sampler.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>

#include "muster/torch/c10d/arguments.h"

namespace muster::data {

DistributedSampler::DistributedSampler(const Group& group, size_t dataset_size, DistributedSamplerOptions options)
    : DistributedSampler(dataset_size, group.membership().size, group.membership().rank, options) {}

DistributedSampler::DistributedSampler(size_t dataset_size, int ranks, Rank rank, DistributedSamplerOptions options)
    : dataset_size_(dataset_size),
      ranks_(static_cast<size_t>(ranks)),
      rank_(static_cast<size_t>(rank)),
      options_(options) {
  check_argument(0 <= rank && rank < ranks, "DistributedSampler", "rank ", rank, " is out of range for world size ",
                 ranks);
  reset();
}

size_t DistributedSampler::size() const {
  return options_.drop_last ? dataset_size_ / ranks_ : (dataset_size_ + ranks_ - 1) / ranks_;
}

void DistributedSampler::reset(std::optional<size_t> new_size) {
  dataset_size_ = new_size.value_or(dataset_size_);
  position_ = 0;
  indices_.clear();
  if (dataset_size_ == 0) return;
  const auto count = static_cast<int64_t>(dataset_size_);
  const at::Tensor order = options_.shuffle
                               ? at::randperm(count, at::detail::createCPUGenerator(options_.seed + epoch()), at::kLong)
                               : at::arange(count, at::kLong);
  const auto at = order.accessor<int64_t, 1>();
  for (size_t i = 0; i < size(); ++i) {
    const size_t position = (rank_ + i * ranks_) % dataset_size_;  // past the end, the first indices are repeated
    indices_.push_back(static_cast<size_t>(at[static_cast<int64_t>(position)]));
  }
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  if (position_ == indices_.size()) return std::nullopt;
  const auto first = indices_.begin() + static_cast<ptrdiff_t>(position_);
  position_ = std::min(position_ + batch_size, indices_.size());
  return std::vector<size_t>(first, indices_.begin() + static_cast<ptrdiff_t>(position_));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("epoch", static_cast<int64_t>(epoch()));
  archive.write("position", static_cast<int64_t>(position_));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  c10::IValue epoch, position;
  archive.read("epoch", epoch);
  archive.read("position", position);
  set_epoch(static_cast<size_t>(epoch.toInt()));
  reset();
  position_ = std::min(static_cast<size_t>(position.toInt()), indices_.size());
}

}  // namespace muster::data
