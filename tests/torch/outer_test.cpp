#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <sstream>

#include "group/ranks.h"
#include "muster/torch/collectives.h"
#include "muster/torch/optim/diloco.h"
#include "muster/torch/optim/local_sgd.h"
#include "torch/models.h"

namespace muster::optim {
namespace {

using test::borrowed;

std::unique_ptr<torch::optim::Optimizer> plain_outer(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(1.0));
}

/// A parameter whose loss pulls it to a target that differs by rank.
struct Quadratic {
  explicit Quadratic(Rank rank)
      : target(at::full({6}, static_cast<double>(rank))),
        parameter(at::full({6}, 5.0 + rank).requires_grad_()),
        inner({parameter}, torch::optim::SGDOptions(0.25)) {}

  template <class Outer>
  void step(Outer& optimizer) {
    optimizer.zero_grad();
    ((parameter - target).square().sum() / 2).backward();
    optimizer.step();
  }
  double value() const { return parameter[3].item<double>(); }

  at::Tensor target, parameter;
  torch::optim::SGD inner;
};

/// The value after `steps` steps that each cover 0.25 of the distance to `target`.
double drawn(double value, double target, int steps) { return target + (value - target) * std::pow(0.75, steps); }

TEST(LocalSGD, AveragesAfterWarmUpAndThenPeriodically) {
  test::run_group(2, "shm", [](Group& group) {
    const Rank rank = group.membership().rank;
    Quadratic quadratic(rank);
    LocalSGD optimizer(borrowed(group), quadratic.inner, {.sync_every = 3, .warmup = 1});
    double together = 5;
    EXPECT_EQ(quadratic.value(), together) << "rank 0's";
    const auto average = [&](int steps) { return (drawn(together, 0, steps) + drawn(together, 1, steps)) / 2; };
    quadratic.step(optimizer);
    together = average(1);
    EXPECT_NEAR(quadratic.value(), together, 1e-6);
    quadratic.step(optimizer);
    EXPECT_NEAR(quadratic.value(), drawn(together, rank, 1), 1e-6) << "its own";
    quadratic.step(optimizer);
    EXPECT_NEAR(quadratic.value(), average(2), 1e-6);
    EXPECT_EQ(optimizer.steps(), 3);
  });
}

TEST(DiLoCo, WithAPlainOuterStepIsAveraging) {
  test::run_group(2, "shm", [](Group& group) {
    Quadratic quadratic(group.membership().rank);
    DiLoCo optimizer(borrowed(group), quadratic.inner, {.sync_every = 1, .outer = plain_outer});
    double together = 5;
    for (int step = 0; step < 5; ++step) {
      quadratic.step(optimizer);
      together = (drawn(together, 0, 1) + drawn(together, 1, 1)) / 2;
      EXPECT_NEAR(quadratic.value(), together, 1e-5);
    }
  });
}

TEST(DiLoCo, MakesAnOuterStepWithNesterovMomentum) {
  test::run_group(2, "shm", [](Group& group) {
    Quadratic quadratic(group.membership().rank);
    DiLoCo optimizer(borrowed(group), quadratic.inner, {.sync_every = 4});
    double together = 5, momentum = 0;
    for (int outer = 0; outer < 3; ++outer) {
      for (int step = 0; step < 4; ++step) quadratic.step(optimizer);
      const double gradient = together - (drawn(together, 0, 4) + drawn(together, 1, 4)) / 2;
      momentum = 0.9 * momentum + gradient;
      together -= 0.7 * (gradient + 0.9 * momentum);
      EXPECT_NEAR(quadratic.value(), together, 1e-5);
    }
  });
}

TEST(DiLoCo, AveragesFragmentsInTurnDuringSteps) {
  test::run_group(2, "shm", [](Group& group) {
    const Rank rank = group.membership().rank;
    std::vector<at::Tensor> parameters;
    for (int i = 0; i < 3; ++i) parameters.push_back(at::zeros({4}).requires_grad_());
    torch::optim::SGD inner(parameters, torch::optim::SGDOptions(1.0));
    DiLoCo optimizer(borrowed(group), inner,
                     {.sync_every = 6, .outer = plain_outer, .fragments = 3, .delay = 1, .merge_alpha = 0},
                     half_compress_hook({borrowed(group), nullptr}, at::kBFloat16));
    // Each step adds 1 to the parameters at rank 0, and 3 at rank 1.
    for (int step = 1; step <= 7; ++step) {
      for (auto& parameter : parameters) parameter.mutable_grad() = at::full({4}, rank == 0 ? -1.F : -3.F);
      optimizer.step();
      const auto at_rank = [&](double replaced, int steps_since) {
        return replaced + (rank == 0 ? 1 : 3) * steps_since;
      };
      // The average of fragment 1 begins after step 2 and is applied after step 3; that of fragment 2 after steps 4 and
      // 5, that of fragment 0 after steps 6 and 7.
      EXPECT_EQ(parameters[1][0].item<double>(), step < 3 ? at_rank(0, step) : at_rank(4, step - 3)) << step;
      EXPECT_EQ(parameters[2][0].item<double>(), step < 5 ? at_rank(0, step) : at_rank(8, step - 5)) << step;
      EXPECT_EQ(parameters[0][0].item<double>(), step < 7 ? at_rank(0, step) : at_rank(12, step - 7)) << step;
    }
    optimizer.synchronize();
    for (const at::Tensor& parameter : parameters) {
      const at::Tensor all = all_gather(group, parameter.detach());
      EXPECT_TRUE(at::equal(all[0], all[1]));
    }
  });
}

TEST(DiLoCo, CompressesEachMatrixByItself) {
  const auto store = memory_store();
  test::run_group(2, "shm", [&](Group& group) {
    std::vector<at::Tensor> parameters = {at::zeros({20, 30}), at::zeros({30, 20}), at::zeros({30})};
    std::vector<at::Tensor> averages;
    torch::optim::SGD inner(parameters, torch::optim::SGDOptions(1.0));
    for (at::Tensor& parameter : parameters) {
      parameter.requires_grad_();
      const auto seed = static_cast<uint64_t>(10 * group.membership().rank) + averages.size();
      const at::Tensor gradient = test::random_tensor(parameter.sizes(), seed);
      // The update of the first matrix has rank 1 at each of the two ranks.
      parameter.mutable_grad() = averages.empty() ? at::outer(gradient.select(1, 0), gradient[0]) : gradient;
      averages.push_back(all_gather(group, parameter.grad()).mean(0));
    }
    DiLoCo optimizer(
        borrowed(group), inner, {.sync_every = 1, .outer = plain_outer},
        power_sgd_hook(hook_groups(borrowed(group), value_or_throw(store->clone())), {.start_powerSGD_iter = 0}));
    optimizer.step();
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::allclose(-parameters[0], averages[0], 1e-4, 1e-4));
    EXPECT_TRUE(at::allclose(-parameters[2], averages[2]));
    EXPECT_EQ(at::linalg_matrix_rank(averages[1], 1e-3).item<int64_t>(), 20);
    EXPECT_EQ(at::linalg_matrix_rank(parameters[1], 1e-3).item<int64_t>(), 2) << "no more was sent";
    EXPECT_LT((parameters[1] + averages[1]).norm().item<double>(), averages[1].norm().item<double>());
    test::expect_alike(group, parameters);
  });
}

template <class Make>
void expect_goes_on(Make make) {
  test::run_group(2, "shm", [&make](Group& group) {
    const Rank rank = group.membership().rank;
    Quadratic straight(rank), stopped(rank), fresh(rank);
    auto plain = make(group, straight), before = make(group, stopped);
    for (int step = 0; step < 5; ++step) {
      straight.step(*plain);
      stopped.step(*before);
    }
    std::stringstream file;
    torch::serialize::OutputArchive written;
    before->save(written);
    written.save_to(file);
    torch::serialize::InputArchive read;
    read.load_from(file);
    auto after = make(group, fresh);
    after->load(read);
    {
      const at::NoGradGuard no_grad;
      fresh.parameter.copy_(stopped.parameter);
    }
    for (int step = 0; step < 5; ++step) {
      straight.step(*plain);
      fresh.step(*after);
    }
    EXPECT_EQ(after->steps(), 10);
    EXPECT_TRUE(at::equal(straight.parameter, fresh.parameter));
  });
}

TEST(LocalSGD, ContinuesFromAnArchive) {
  expect_goes_on([](Group& group, Quadratic& quadratic) {
    return std::make_unique<LocalSGD>(borrowed(group), quadratic.inner, LocalSGDOptions{.sync_every = 3});
  });
}

TEST(DiLoCo, ContinuesFromAnArchive) {
  expect_goes_on([](Group& group, Quadratic& quadratic) {
    return std::make_unique<DiLoCo>(borrowed(group), quadratic.inner, DiLoCoOptions{.sync_every = 3});
  });
}

TEST(DiLoCo, RefusesInvalidOptions) {
  test::run_group(1, "shm", [](Group& group) {
    Quadratic quadratic(0);
    EXPECT_THROW(DiLoCo(borrowed(group), quadratic.inner, {.sync_every = 0}), c10::ValueError);
    EXPECT_THROW(DiLoCo(borrowed(group), quadratic.inner, {.sync_every = 4, .delay = 4}), c10::ValueError);
    EXPECT_THROW(DiLoCo(borrowed(group), quadratic.inner, {.sync_every = 4, .fragments = 2}), c10::ValueError);
    EXPECT_THROW(LocalSGD(borrowed(group), quadratic.inner, {.sync_every = 0}), c10::ValueError);
  });
}

}  // namespace
}  // namespace muster::optim
