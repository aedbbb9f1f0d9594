// DistributedDataParallel::join: ranks with different numbers of batches.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "group/ranks.h"
#include "muster/torch/hooks.h"
#include "muster/torch/nn/distributed_data_parallel.h"
#include "muster/torch/optim/zero_redundancy_optimizer.h"
#include "torch/models.h"

namespace muster::nn {
namespace {

using test::borrowed, test::expect_alike, test::expect_close, test::make_mlp, test::random_tensor;
using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
using MakeOptimizer = std::function<Optimizer(Group&, const std::vector<at::Tensor>&)>;

/// The number of batches of each of three ranks, by epoch.
const std::vector<std::vector<uint64_t>> kBatches = {{0, 3, 1}, {4, 2, 4}};

at::Tensor batch_of(uint64_t rank, size_t epoch, uint64_t step) {
  return random_tensor({4, 6}, 1000 * rank + 100 * epoch + step);
}

const torch::optim::SGDOptions kSgd = torch::optim::SGDOptions(0.1).momentum(0.9);
Optimizer make_sgd(Group&, const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, kSgd);
}
Optimizer make_sharded(Group& group, const std::vector<at::Tensor>& parameters) {
  return std::make_unique<optim::ZeroRedundancyOptimizer<torch::optim::SGD>>(borrowed(group), parameters, kSgd);
}

/// Trains one process on the batches of all ranks, then on `last`.
std::vector<at::Tensor> reference_parameters(bool divide_by_world_size, const at::Tensor& last) {
  auto model = make_mlp(1);
  torch::optim::SGD optimizer(model->parameters(), kSgd);
  const auto update = [&](const std::vector<at::Tensor>& batches, size_t divisor) {
    optimizer.zero_grad();
    for (const at::Tensor& batch : batches) (model->forward(batch).pow(2).mean() / divisor).backward();
    optimizer.step();
  };
  for (size_t epoch = 0; epoch < kBatches.size(); ++epoch) {
    const auto& counts = kBatches[epoch];
    for (uint64_t step = 0; step < *std::max_element(counts.begin(), counts.end()); ++step) {
      std::vector<at::Tensor> batches;
      for (size_t rank = 0; rank < counts.size(); ++rank) {
        if (step < counts[rank]) batches.push_back(batch_of(rank, epoch, step));
      }
      update(batches, divide_by_world_size ? counts.size() : batches.size());
    }
  }
  update({last}, 1);
  return model->parameters();
}

void expect_uneven_training_as_one_process(const DistributedDataParallelOptions& options, JoinOptions join = {},
                                           const MakeOptimizer& make = make_sgd, bool hooked = false) {
  test::run_group(3, "shm", [&](Group& group) {
    const auto rank = static_cast<size_t>(group.membership().rank);
    auto model = make_mlp(1);
    DistributedDataParallel ddp(model, borrowed(group), options);
    if (hooked) ddp.register_comm_hook(all_reduce_hook({borrowed(group)}));
    const Optimizer optimizer = make(group, ddp.parameters());
    const auto step_on = [&](const at::Tensor& batch) {
      optimizer->zero_grad();
      ddp.forward(batch).pow(2).mean().backward();
      optimizer->step();
    };
    for (size_t epoch = 0; epoch < kBatches.size(); ++epoch) {
      ddp.join(
          [&] {
            for (uint64_t step = 0; step < kBatches[epoch][rank]; ++step) step_on(batch_of(rank, epoch, step));
          },
          [&] { optimizer->step(); }, join);
      expect_alike(group, ddp.parameters());
    }
    const at::Tensor last = random_tensor({4, 6}, 9);
    step_on(last);  // an ordinary step after join(), with the optimizer's momentum
    expect_alike(group, ddp.parameters());
    expect_close(ddp.parameters(), reference_parameters(join.divide_by_initial_world_size, last));
  });
}

TEST(Join, TrainsAsOneProcessOnAllBatches) {
  expect_uneven_training_as_one_process({});
  expect_uneven_training_as_one_process({.bucket_cap_mb = 0.001, .first_bucket_mb = 0.0005});
  expect_uneven_training_as_one_process({.gradient_as_bucket_view = false});
  expect_uneven_training_as_one_process({.find_unused_parameters = true});
  expect_uneven_training_as_one_process({.static_graph = true});
}

TEST(Join, DividesByTheRanksWithDataIfConfigured) {
  expect_uneven_training_as_one_process({}, {.divide_by_initial_world_size = false});
  expect_uneven_training_as_one_process({.static_graph = true}, {.divide_by_initial_world_size = false});
}

TEST(Join, ReducesThroughAHook) {
  expect_uneven_training_as_one_process({}, {}, make_sgd, true);
  expect_uneven_training_as_one_process({}, {.divide_by_initial_world_size = false}, make_sgd, true);
}

TEST(Join, StepsAShardedOptimizerAtAllRanks) { expect_uneven_training_as_one_process({}, {}, make_sharded); }

TEST(Join, CountsOnlyForwardsThatReduce) {
  test::run_group(2, "shm", [](Group& group) {
    auto model = make_mlp(1), reference = make_mlp(1);
    DistributedDataParallel ddp(model, borrowed(group));
    int updates = 0;
    const at::Tensor first = random_tensor({4, 6}, 1), second = random_tensor({4, 6}, 2);
    ddp.join(
        [&] {
          if (group.membership().rank == 0) return;
          {
            const auto quiet = ddp.no_sync();
            ddp.forward(first).pow(2).mean().backward();
          }
          {
            const torch::NoGradGuard no_gradients;
            ddp.forward(first);
          }
          ddp.forward(second).pow(2).mean().backward();
          ++updates;
        },
        [&] { ++updates; });
    EXPECT_EQ(updates, 1);
    for (const at::Tensor& batch : {first, second}) (reference->forward(batch).pow(2).mean() / 2).backward();
    for (size_t i = 0; i < ddp.parameters().size(); ++i) {
      EXPECT_TRUE(at::allclose(ddp.parameters()[i].grad(), reference->parameters()[i].grad(), 1e-4, 1e-6)) << i;
    }
  });
}

TEST(Join, KeepsTheBuffersOfTheLastRankWithData) {
  test::run_group(3, "shm", [](Group& group) {
    const auto rank = static_cast<uint64_t>(group.membership().rank);
    torch::nn::Sequential model(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4));
    DistributedDataParallel ddp(model, borrowed(group));
    std::vector<at::Tensor> own;  // this rank's buffers after its last step
    ddp.join(
        [&] {
          for (uint64_t step = 0; step < 1 + rank; ++step) ddp.forward(batch_of(rank, 0, step)).sum().backward();
          for (const at::Tensor& buffer : model->buffers()) own.push_back(buffer.clone());
        },
        [] {});
    expect_alike(group, model->buffers());
    if (rank == 2) {
      for (size_t i = 0; i < own.size(); ++i) EXPECT_TRUE(at::equal(model->buffers()[i], own[i])) << i;
    }
  });
}

TEST(Join, KeepsGloballyUnusedParameters) {
  struct Halves : torch::nn::Module {
    Halves() {
      used = register_module("used", torch::nn::Linear(6, 2));
      unused = register_module("unused", torch::nn::Linear(6, 2));
    }
    at::Tensor forward(const at::Tensor& input) { return used->forward(input); }
    torch::nn::Linear used = nullptr, unused = nullptr;
  };
  for (const bool is_static : {false, true}) {
    test::run_group(2, "shm", [is_static](Group& group) {
      const auto model = std::make_shared<Halves>();
      DistributedDataParallel ddp(model, borrowed(group),
                                  {.find_unused_parameters = !is_static, .static_graph = is_static});
      ddp.join(
          [&] {
            const int steps = 3 * group.membership().rank;
            for (int step = 0; step < steps; ++step) {
              ddp.zero_grad();
              ddp.forward(at::ones({1, 6})).sum().backward();
            }
          },
          [] {});
      EXPECT_TRUE(at::equal(model->used->weight.grad(), at::full({2, 6}, 0.5))) << model->used->weight.grad();
      EXPECT_FALSE(model->unused->weight.grad().defined());
    });
  }
}

TEST(Join, PassesOnExceptionsOfTraining) {
  test::run_group(1, "shm", [](Group& group) {
    DistributedDataParallel ddp(make_mlp(1), borrowed(group));
    EXPECT_THROW(ddp.join([] { throw std::runtime_error("no more"); }, [] {}), std::runtime_error);
    const uint64_t before = group.sequence();
    ddp.forward(batch_of(0, 0, 0));
    EXPECT_EQ(group.sequence(), before) << "it is not in join() anymore";
  });
}

TEST(Join, RefusesUnsupportedOptions) {
  test::run_group(1, "shm", [](Group& group) {
    DistributedDataParallel ddp(make_mlp(1), borrowed(group));
    EXPECT_THROW(ddp.join([] {}, nullptr), c10::ValueError);
    DistributedDataParallel skipping(make_mlp(1), borrowed(group), {.skip_all_reduce_unused_parameters = true});
    EXPECT_THROW(skipping.join([] {}, [] {}), c10::ValueError);
  });
}

}  // namespace
}  // namespace muster::nn
