#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torch/data/samplers/base.h>

#include "muster/group/group.h"

namespace muster::data {

struct DistributedSamplerOptions {
  bool shuffle = true;  ///< false: in order
  uint64_t seed = 0;    ///< the same at all ranks
  /// What does not give every rank the same number of indices is left out; false: the first indices of the epoch are
  /// repeated instead.
  bool drop_last = false;
};

/// Each rank's share of the indices of a data set, for torch::data loaders: every epoch all ranks shuffle alike and
/// rank r takes each size-th index from the r-th on. The indices are those of PyTorch's
/// torch.utils.data.DistributedSampler (Python) for the same seed and epoch, so a run can be repeated in either
/// language; libtorch's own distributed samplers shuffle otherwise.
///
///   muster::data::DistributedSampler sampler(*group, dataset.size().value());
///   auto loader = torch::data::make_data_loader(dataset, sampler, 32);
///   for (size_t epoch = 0; epoch < 10; ++epoch) {
///     sampler.set_epoch(epoch);
///     for (auto& batch : *loader) ...
///
/// A loader keeps a copy of its sampler: copies share the epoch, and nothing else. Throws c10::ValueError for a rank
/// that is none. set_epoch() may be called from any thread, the rest by one at a time.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  DistributedSampler(const Group& group, size_t dataset_size, DistributedSamplerOptions options = {});
  DistributedSampler(size_t dataset_size, int ranks, Rank rank, DistributedSamplerOptions options = {});

  /// Another order, from the next reset() on: a loader's begin() does one.
  void set_epoch(size_t epoch) { *epoch_ = epoch; }
  size_t epoch() const { return *epoch_; }
  /// Indices of this rank in an epoch, the same number at every rank.
  size_t size() const;
  /// Those of this epoch.
  const std::vector<size_t>& indices() const { return indices_; }

  /// Starts over, in the order of the epoch that was set last. `new_size`: of the data set.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  /// The epoch and how far in it this is: after load(), next() goes on from there.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  size_t dataset_size_;
  size_t ranks_;
  size_t rank_;
  DistributedSamplerOptions options_;
  std::shared_ptr<std::atomic<size_t>> epoch_ = std::make_shared<std::atomic<size_t>>(0);  // shared with all copies
  std::vector<size_t> indices_;
  size_t position_ = 0;
};

}  // namespace muster::data
