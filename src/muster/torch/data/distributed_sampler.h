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
  /// Drops the indices that cannot be divided evenly between the ranks. False: repeats the first indices of the epoch
  /// instead.
  bool drop_last = false;
};

/// Each rank's share of the indices of a data set, for torch::data loaders. In every epoch all ranks shuffle in the
/// same way, and rank r takes every size-th index from the r-th on. For the same seed and epoch the indices are those
/// of Python's torch.utils.data.DistributedSampler; libtorch's own distributed samplers shuffle differently.
///
///   muster::data::DistributedSampler sampler(*group, dataset.size().value());
///   auto loader = torch::data::make_data_loader(dataset, sampler, 32);
///   for (size_t epoch = 0; epoch < 10; ++epoch) {
///     sampler.set_epoch(epoch);
///     for (auto& batch : *loader) ...
///
/// A loader keeps a copy of its sampler: copies share only the epoch. Throws c10::ValueError for a rank that is out of
/// range. set_epoch() may be called from any thread, other functions by one thread at a time.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  DistributedSampler(const Group& group, size_t dataset_size, DistributedSamplerOptions options = {});
  DistributedSampler(size_t dataset_size, int ranks, Rank rank, DistributedSamplerOptions options = {});

  /// Selects the order from the next reset() on, which a loader's begin() calls.
  void set_epoch(size_t epoch) { *epoch_ = epoch; }
  size_t epoch() const { return *epoch_; }
  /// The number of indices of this rank in an epoch, the same at every rank.
  size_t size() const;
  /// This rank's indices in this epoch.
  const std::vector<size_t>& indices() const { return indices_; }

  /// Starts over in the order of the current epoch. `new_size`, if any, is the new size of the data set.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  /// Saves the epoch and the position in it. After load(), next() continues at that position.
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
