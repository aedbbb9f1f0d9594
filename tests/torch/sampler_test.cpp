#include <gtest/gtest.h>
#include <torch/data.h>
#include <torch/serialize.h>

#include <numeric>

#include "muster/torch/data/distributed_sampler.h"

namespace muster::data {
namespace {

using Indices = std::vector<size_t>;

Indices indices_of(size_t size, int ranks, Rank rank, DistributedSamplerOptions options, size_t epoch) {
  DistributedSampler sampler(size, ranks, rank, options);
  sampler.set_epoch(epoch);
  sampler.reset();
  return sampler.indices();
}

// The expected indices are those of torch.utils.data.DistributedSampler(range(10), 3, rank, seed=7) after set_epoch(2).
TEST(DistributedSampler, HasTheIndicesOfPythonsSampler) {
  EXPECT_EQ(indices_of(10, 3, 0, {.seed = 7}, 2), (Indices{0, 7, 9, 3}));
  EXPECT_EQ(indices_of(10, 3, 1, {.seed = 7}, 2), (Indices{5, 6, 1, 0}));
  EXPECT_EQ(indices_of(10, 3, 2, {.seed = 7}, 2), (Indices{8, 2, 4, 5}));
  EXPECT_EQ(indices_of(10, 3, 1, {.seed = 7, .drop_last = true}, 2), (Indices{5, 6, 1}));
  EXPECT_EQ(indices_of(10, 3, 2, {.shuffle = false}, 2), (Indices{2, 5, 8, 1}));
  EXPECT_EQ(indices_of(2, 5, 4, {.seed = 1}, 0), (Indices{1})) << "more ranks than samples: the epoch is repeated";
  EXPECT_EQ(indices_of(2, 5, 4, {.drop_last = true}, 0), Indices{});
  EXPECT_EQ(indices_of(0, 5, 4, {}, 0), Indices{});
}

TEST(DistributedSampler, AssignsEachIndexOnce) {
  for (const size_t size : {12, 13}) {
    Indices all;
    for (Rank rank = 0; rank < 4; ++rank) {
      const Indices mine = indices_of(size, 4, rank, {.drop_last = true}, 5);
      EXPECT_EQ(mine.size(), 3U);
      all.insert(all.end(), mine.begin(), mine.end());
    }
    std::sort(all.begin(), all.end());
    EXPECT_EQ(std::unique(all.begin(), all.end()), all.end());
  }
  EXPECT_NE(indices_of(40, 2, 0, {}, 0), indices_of(40, 2, 0, {}, 1));
  EXPECT_NE(indices_of(40, 2, 0, {.seed = 1}, 0), indices_of(40, 2, 0, {.seed = 2}, 0));
}

struct Squares : torch::data::datasets::Dataset<Squares, int64_t> {
  int64_t get(size_t index) override { return static_cast<int64_t>(index * index); }
  std::optional<size_t> size() const override { return 9; }
};

TEST(DistributedSampler, SharesTheEpochWithALoadersCopy) {
  DistributedSampler sampler(9, 2, 1);
  auto loader = torch::data::make_data_loader(Squares(), sampler, torch::data::DataLoaderOptions(2));
  const auto epoch = [&loader] {
    std::vector<int64_t> values;
    for (auto& batch : *loader) values.insert(values.end(), batch.begin(), batch.end());
    return values;
  };
  const auto first = epoch();
  EXPECT_EQ(first.size(), 5U);
  EXPECT_EQ(epoch(), first);
  sampler.set_epoch(1);
  EXPECT_NE(epoch(), first);
  std::vector<int64_t> expected;
  for (const size_t index : indices_of(9, 2, 1, {}, 1)) expected.push_back(static_cast<int64_t>(index * index));
  EXPECT_EQ(epoch(), expected);
}

TEST(DistributedSampler, ContinuesWhereItWasSaved) {
  DistributedSampler sampler(20, 2, 0);
  sampler.set_epoch(3);
  sampler.reset();
  sampler.next(4);
  torch::serialize::OutputArchive out;
  sampler.save(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  DistributedSampler other(20, 2, 0);
  other.load(in);
  EXPECT_EQ(other.epoch(), 3U);
  EXPECT_EQ(other.next(100), sampler.next(100));
  EXPECT_EQ(other.next(1), std::nullopt);
}

TEST(DistributedSampler, RefusesARankOutOfRange) {
  EXPECT_THROW(DistributedSampler(10, 2, 2), c10::ValueError);
  EXPECT_THROW(DistributedSampler(10, 0, 0), c10::ValueError);
  EXPECT_THROW(DistributedSampler(10, 2, -1), c10::ValueError);
}

}  // namespace
}  // namespace muster::data
