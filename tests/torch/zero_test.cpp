#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>
#include <sstream>

#include "group/ranks.h"
#include "muster/torch/collectives.h"
#include "muster/torch/nn/clip_grad.h"
#include "muster/torch/optim/partition.h"
#include "muster/torch/optim/zero_redundancy_optimizer.h"
#include "torch/models.h"

namespace muster::optim {
namespace {

using test::borrowed, test::make_mlp;

/// Sets gradients that are the same at every rank, as DistributedDataParallel leaves them.
void set_gradients(torch::nn::Sequential& model, int step) {
  uint64_t seed = static_cast<uint64_t>(step) * 100;
  for (auto& parameter : model->parameters()) {
    parameter.mutable_grad() = test::random_tensor(parameter.sizes(), ++seed);
  }
}

void expect_equal(torch::nn::Sequential& a, torch::nn::Sequential& b) {
  for (size_t i = 0; i < a->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(a->parameters()[i], b->parameters()[i])) << "parameter " << i;
  }
}

template <class Optimizer, class Options>
void expect_steps_as_the_plain_one(Group& group, const Options& options) {
  auto model = make_mlp(1), reference = make_mlp(1);
  ZeroRedundancyOptimizer<Optimizer> sharded(borrowed(group), model->parameters(), options);
  Optimizer plain(reference->parameters(), options);
  for (int step = 0; step < 4; ++step) {
    set_gradients(model, step);
    set_gradients(reference, step);
    sharded.step();
    plain.step();
  }
  expect_equal(model, reference);
}

TEST(Partition, AssignsTheLargestToTheSmallestLoad) {
  std::vector<size_t> loads(3);
  EXPECT_EQ(partition({1, 7, 5, 4, 4}, loads), (std::vector<Rank>{1, 0, 1, 2, 2}));
  EXPECT_EQ(loads, (std::vector<size_t>{7, 6, 8}));
  EXPECT_EQ(partition({1}, loads), std::vector<Rank>{1});
}

TEST(ZeroRedundancyOptimizer, StepsAsThePlainOptimizer) {
  for (const std::string transport : {"shm", "tcp"}) {
    test::run_group(3, transport, [](Group& group) {
      expect_steps_as_the_plain_one<torch::optim::SGD>(group, torch::optim::SGDOptions(0.1).momentum(0.9));
      expect_steps_as_the_plain_one<torch::optim::Adam>(group, torch::optim::AdamOptions(0.01));
      expect_steps_as_the_plain_one<torch::optim::AdamW>(group, torch::optim::AdamWOptions(0.01).amsgrad(true));
      expect_steps_as_the_plain_one<torch::optim::Adagrad>(group, torch::optim::AdagradOptions(0.1));
      expect_steps_as_the_plain_one<torch::optim::RMSprop>(group, torch::optim::RMSpropOptions(0.01));
    });
  }
}

TEST(ZeroRedundancyOptimizer, KeepsAShareOfTheState) {
  test::run_group(2, "shm", [](Group& group) {
    auto model = make_mlp(1);
    ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(borrowed(group), model->parameters(),
                                                          torch::optim::AdamOptions(0.01));
    set_gradients(model, 0);
    optimizer.step();
    size_t mine = 0, all = 0;
    for (const at::Tensor& parameter : optimizer.own_parameters()) mine += parameter.nbytes();
    for (const at::Tensor& parameter : model->parameters()) all += parameter.nbytes();
    EXPECT_EQ(optimizer.local().state().size(), optimizer.own_parameters().size());
    EXPECT_LT(mine, all * 2 / 3);
    EXPECT_GT(mine, all / 3);
    EXPECT_EQ(optimizer.state().size(), 0U);
  });
}

TEST(ZeroRedundancyOptimizer, AllowsIdleRanksAndMixedDtypes) {
  test::run_group(4, "shm", [](Group& group) {
    const auto make = [] {
      return std::vector<at::Tensor>{at::ones({5}).requires_grad_(), at::ones({3}, at::kDouble).requires_grad_(),
                                     at::ones({2, 3}).t().requires_grad_()};
    };
    const auto sharded_values = make(), values = make();
    ZeroRedundancyOptimizer<torch::optim::SGD> sharded(borrowed(group), sharded_values, torch::optim::SGDOptions(0.5));
    torch::optim::SGD plain(values, torch::optim::SGDOptions(0.5));
    for (const auto& list : {sharded_values, values}) {
      for (const at::Tensor& value : list) value.mutable_grad() = at::full_like(value, 3);
    }
    sharded.step();
    plain.step();
    for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(at::equal(sharded_values[i], values[i])) << i;
  });
}

TEST(ZeroRedundancyOptimizer, FollowsGroupsOptionsAndSchedulers) {
  test::run_group(2, "shm", [](Group& group) {
    auto model = make_mlp(1), reference = make_mlp(1);
    using torch::optim::OptimizerParamGroup;
    using torch::optim::SGDOptions;
    const auto groups = [](torch::nn::Sequential& of) {
      auto all = of->parameters();
      std::vector<OptimizerParamGroup> result;
      result.emplace_back(std::vector<at::Tensor>(all.begin(), all.begin() + 2));
      result.emplace_back(std::vector<at::Tensor>(all.begin() + 2, all.begin() + 4),
                          std::make_unique<SGDOptions>(SGDOptions(0.3).momentum(0.5)));
      return result;
    };
    ZeroRedundancyOptimizer<torch::optim::SGD> sharded(borrowed(group), groups(model), SGDOptions(0.1));
    torch::optim::SGD plain(groups(reference), SGDOptions(0.1));
    torch::optim::StepLR sharded_schedule(sharded, 1, 0.5), schedule(plain, 1, 0.5);
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {  // adds the rest of the parameters
        const auto rest = [](torch::nn::Sequential& of) {
          auto all = of->parameters();
          return OptimizerParamGroup(std::vector<at::Tensor>(all.begin() + 4, all.end()));
        };
        sharded.add_param_group(rest(model));
        plain.add_param_group(rest(reference));
      }
      set_gradients(model, step);
      set_gradients(reference, step);
      sharded.step();
      plain.step();
      sharded_schedule.step();
      schedule.step();
    }
    expect_equal(model, reference);
  });
}

TEST(ZeroRedundancyOptimizer, SharesArchivesWithThePlainOptimizer) {
  test::run_group(3, "shm", [](Group& group) {
    using torch::optim::Adam, torch::optim::AdamOptions;
    auto model = make_mlp(1), reference = make_mlp(1);
    ZeroRedundancyOptimizer<Adam> sharded(borrowed(group), model->parameters(), AdamOptions(0.01));
    Adam plain(reference->parameters(), AdamOptions(0.01));
    const auto step = [&](torch::optim::Optimizer& first, torch::optim::Optimizer& second, int number) {
      set_gradients(model, number);
      set_gradients(reference, number);
      first.step();
      second.step();
    };
    step(sharded, plain, 0);
    step(sharded, plain, 1);

    std::stringstream stream;
    torch::save(plain, stream);
    ZeroRedundancyOptimizer<Adam> resumed(borrowed(group), model->parameters(), AdamOptions(0.5));
    torch::load(resumed, stream);
    step(resumed, plain, 2);
    expect_equal(model, reference);

    const auto whole = resumed.consolidate(1);
    EXPECT_EQ(whole != nullptr, group.membership().rank == 1);
    if (whole) {
      EXPECT_EQ(whole->state().size(), 6U);
      std::stringstream second;
      torch::save(*whole, second);
      Adam again(reference->parameters(), AdamOptions(0.5));
      torch::load(again, second);
      set_gradients(reference, 3);
      again.step();
    }
    set_gradients(model, 3);
    resumed.step();
    if (whole) expect_equal(model, reference);
    EXPECT_THROW(torch::save(resumed, stream), c10::ValueError);
  });
}

TEST(ClipGradNorm, IsTheNormOverAllShards) {
  test::run_group(3, "shm", [](Group& group) {
    for (const double order : {2., 1., 3., 0., std::numeric_limits<double>::infinity()}) {
      auto whole = make_mlp(1), part = make_mlp(1);
      set_gradients(whole, 1);
      set_gradients(part, 1);
      const auto all = part->parameters();
      std::vector<at::Tensor> mine;
      for (size_t i = 0; i < all.size(); ++i) {
        if (static_cast<Rank>(i % 2) == group.membership().rank) mine.push_back(all[i]);  // rank 2 has none
      }
      const double expected = torch::nn::utils::clip_grad_norm_(whole->parameters(), 0.5, order);
      EXPECT_NEAR(nn::clip_grad_norm_(group, mine, 0.5, order), expected, 1e-4 * expected) << "order " << order;
      for (size_t i = 0; i < all.size(); ++i) {
        if (static_cast<Rank>(i % 2) != group.membership().rank) continue;
        EXPECT_TRUE(at::allclose(all[i].grad(), whole->parameters()[i].grad())) << "order " << order;
      }
    }
  });
}

TEST(ClipGradNorm, WorksWithZeroAndRefusesNonFiniteNorms) {
  test::run_group(2, "shm", [](Group& group) {
    auto model = make_mlp(1), reference = make_mlp(1);
    torch::optim::SGDOptions options(0.1);
    ZeroRedundancyOptimizer<torch::optim::SGD> sharded(borrowed(group), model->parameters(), options);
    torch::optim::SGD plain(reference->parameters(), options);
    set_gradients(model, 1);
    set_gradients(reference, 1);
    const double expected = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.1);
    EXPECT_NEAR(sharded.clip_grad_norm_(0.1), expected, 1e-4);
    sharded.step();
    plain.step();
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_TRUE(at::allclose(model->parameters()[i], reference->parameters()[i], 1e-5, 1e-7));
    }
    // Only one rank's share is not finite, and both ranks throw.
    model->parameters()[0].mutable_grad().fill_(std::numeric_limits<float>::infinity());
    EXPECT_THROW(sharded.clip_grad_norm_(0.1, 2, /*error_if_nonfinite=*/true), c10::ValueError);
  });
}

}  // namespace
}  // namespace muster::optim
