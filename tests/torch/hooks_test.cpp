#include "muster/torch/hooks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <latch>

#include "group/ranks.h"
#include "muster/torch/collectives.h"
#include "torch/models.h"

namespace muster {
namespace {

using MakeHook = std::function<Hook(HookGroups)>;
using Tensors = std::vector<at::Tensor>;

/// One rank: its hook, and the groups that the hook uses.
class Worker {
 public:
  Worker(HookGroups groups, const MakeHook& make) : groups_(std::move(groups)), hook_(make(groups_)) {}

  /// Gives all buckets to the hook, then waits for them. Each bucket is one gradient.
  Tensors reduce(const Tensors& gradients) {
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
    for (size_t i = 0; i < gradients.size(); ++i) futures.push_back(begin(gradients[i], i, gradients.size()));
    Tensors results;
    for (const auto& future : futures) {
      future->waitAndThrow();
      results.push_back(hook_->parseHookResult(future->value()));
    }
    return results;
  }
  at::Tensor reduce(const at::Tensor& gradient) { return reduce(Tensors{gradient}).front(); }

  c10::intrusive_ptr<c10::ivalue::Future> begin(const at::Tensor& gradient, size_t index = 0, size_t count = 1) {
    const at::Tensor buffer = gradient.is_sparse() ? gradient : gradient.reshape(-1).clone();
    c10d::GradBucket bucket(index, count, buffer, {0}, {static_cast<size_t>(gradient.numel())}, {gradient.sizes()},
                            {parameter_}, std::nullopt);
    return hook_->runHook(bucket);
  }
  void destroy_hook() { hook_.reset(); }
  Group& group() { return *groups_.group; }
  Group& second_group() { return *groups_.secondary_group; }
  Rank rank() { return group().membership().rank; }
  bool same_everywhere(const at::Tensor& tensor) {
    const at::Tensor all = all_gather(group(), tensor.view(at::kInt));
    return at::equal(all, tensor.view(at::kInt).expand_as(all));
  }

 private:
  HookGroups groups_;
  Hook hook_;
  at::Tensor parameter_ = at::zeros({1});
};

void run_workers(int size, const std::string& transports, const MakeHook& make,
                 const std::function<void(Worker&)>& body) {
  const auto store = memory_store();
  test::run_ranks(size, [&](Rank rank) {
    const std::shared_ptr<Store> handle = value_or_throw(store->clone());
    const HookGroups groups = hook_groups(
        value_or_throw(Group::form(*handle, {rank, size, "test", 0}, test::options_for(transports))), handle);
    Worker worker(groups, make);
    body(worker);
    static_cast<void>(groups.group->barrier().result());  // keeps each rank in the group until all are done
  });
}

at::Tensor normal(at::IntArrayRef shape, int64_t seed) {
  return at::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed), at::kFloat);
}
/// The average over ranks whose gradients are normal(shape, seed + rank).
at::Tensor average_of(at::IntArrayRef shape, int64_t seed, int size) {
  at::Tensor sum = at::zeros(shape);
  for (int r = 0; r < size; ++r) sum += normal(shape, seed + r);
  return sum / size;
}
double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a.flatten() - b.flatten()).abs().max().item<double>();
}

Hook fp16(HookGroups groups) { return half_compress_hook(std::move(groups), at::kHalf); }
Hook bf16(HookGroups groups) { return half_compress_hook(std::move(groups), at::kBFloat16); }
Hook int8(HookGroups groups) { return int8_hook(std::move(groups)); }
Hook int8_in_small_blocks(HookGroups groups) { return int8_hook(std::move(groups), {.block = 64}); }
Hook top_k(HookGroups groups) { return top_k_hook(std::move(groups), {.ratio = 0.25}); }
Hook all_of_top_k(HookGroups groups) { return top_k_hook(std::move(groups), {.ratio = 1}); }
Hook power_sgd(HookGroups groups) { return power_sgd_hook(std::move(groups), {.rank = 4, .start_powerSGD_iter = 0}); }

struct Case {
  const char* name;
  MakeHook make;
  double loss;  ///< bound on the error of one step, for gradients that are about normal
};
const Case kCases[] = {{"all_reduce", all_reduce_hook, 1e-6},
                       {"fp16", fp16, 4e-3},
                       {"bf16", bf16, 3e-2},
                       {"int8", int8, 0.08},
                       {"int8/64", int8_in_small_blocks, 0.08},
                       {"top_k of all", all_of_top_k, 1e-6},
                       {"top_k", top_k, 5},
                       {"power_sgd", power_sgd, 5}};

TEST(Hooks, GiveEveryRankTheSameAverage) {
  for (const Case& hook : kCases) {
    for (const auto& [size, transports] : {std::pair{2, "shm"}, {3, "shm"}, {3, "tcp"}}) {
      run_workers(size, transports, hook.make, [&, size = size](Worker& worker) {
        for (int64_t step = 0; step < 3; ++step) {
          // Buckets of different shapes, reduced at the same time.
          const std::vector<std::vector<int64_t>> shapes = {{40, 60}, {1}, {257}, {96, 31}, {5}};
          Tensors gradients;
          for (const auto& shape : shapes) gradients.push_back(normal(shape, step + worker.rank()));
          const Tensors results = worker.reduce(gradients);
          for (size_t i = 0; i < shapes.size(); ++i) {
            EXPECT_TRUE(worker.same_everywhere(results[i])) << hook.name << ", bucket " << i;
            EXPECT_LE(distance(results[i], average_of(shapes[i], step, size)), hook.loss) << hook.name << ", " << i;
          }
        }
      });
    }
  }
}

TEST(Hooks, Int8AveragesABucketOfSeveralChunks) {
  run_workers(2, "shm", int8, [](Worker& worker) {
    const std::vector<int64_t> shape = {(4 << 20) + 300};
    const at::Tensor result = worker.reduce(normal(shape, worker.rank()));
    EXPECT_TRUE(worker.same_everywhere(result));
    EXPECT_LE(distance(result, average_of(shape, 0, 2)), 0.08);
  });
}

TEST(Hooks, CompressionErrorIsAddedToTheNextStep) {
  for (const MakeHook& make : {MakeHook(int8), MakeHook(top_k), MakeHook(power_sgd)}) {
    run_workers(2, "shm", make, [](Worker& worker) {
      constexpr int kSteps = 40;
      const at::Tensor gradient = normal({48, 48}, worker.rank());
      at::Tensor sum = at::zeros({48, 48});
      for (int step = 0; step < kSteps; ++step) sum += worker.reduce(gradient).view({48, 48});
      const at::Tensor average = average_of({48, 48}, 0, 2);
      EXPECT_LE((sum / kSteps - average).norm().item<double>(), 0.35 * average.norm().item<double>());
    });
  }
  // The error that int8 keeps for later steps is that of one rounding.
  run_workers(2, "shm", int8, [](Worker& worker) {
    const at::Tensor gradient = normal({1000}, worker.rank());
    at::Tensor sum = at::zeros({1000});
    for (int step = 0; step < 100; ++step) sum += worker.reduce(gradient);
    EXPECT_LE(distance(sum / 100, average_of({1000}, 0, 2)), 1e-3);
  });
}

TEST(Hooks, LeastSquaresConvergesWithCompressedGradients) {
  const at::Tensor truth = normal({24, 16}, 100);
  for (const MakeHook& make : {MakeHook(int8), MakeHook(top_k), MakeHook(power_sgd)}) {
    run_workers(2, "shm", make, [&](Worker& worker) {
      const at::Tensor x = normal({64, 24}, worker.rank()), y = x.mm(truth);
      at::Tensor weight = at::zeros({24, 16});
      for (int step = 0; step < 300; ++step) {
        const at::Tensor gradient = x.t().mm(x.mm(weight) - y) / 64;
        weight = weight - 0.1 * worker.reduce(gradient).view({24, 16});
      }
      EXPECT_LE(distance(weight, truth), 0.01);
    });
  }
}

TEST(Hooks, MatrixOfTheGivenRankIsAveragedExactly) {
  run_workers(2, "shm", power_sgd, [](Worker& worker) {
    const auto low = [](int rank) { return normal({30, 2}, rank).mm(normal({2, 50}, 10 + rank)); };
    EXPECT_LE(distance(worker.reduce(low(worker.rank())), (low(0) + low(1)) / 2), 1e-4);
  });
}

TEST(Hooks, PowerSgdDoesNotCompressTheFirstSteps) {
  const auto later = [](HookGroups groups) {
    return power_sgd_hook(std::move(groups), {.rank = 1, .start_powerSGD_iter = 2});
  };
  run_workers(2, "shm", later, [](Worker& worker) {
    const Tensors gradients = {normal({40, 40}, worker.rank()), normal({40, 40}, worker.rank() + 5)};
    for (int step = 0; step < 3; ++step) {
      const double lost = distance(worker.reduce(gradients)[0], average_of({40, 40}, 0, 2));
      EXPECT_EQ(lost > 1e-6, step == 2) << lost;
    }
  });
}

TEST(Hooks, OverflowIsSeenByAllRanksAndForgottenByTheNextStep) {
  for (const Case& hook : kCases) {
    run_workers(2, "shm", hook.make, [&](Worker& worker) {
      const at::Tensor gradient = normal({40, 60}, worker.rank());
      at::Tensor bad = gradient.clone();
      if (worker.rank() == 1) bad[3][7] = std::numeric_limits<float>::infinity();
      const at::Tensor result = worker.reduce(bad);
      EXPECT_FALSE(result.isfinite().all().item<bool>()) << hook.name;
      for (int step = 0; step < 3; ++step) {
        EXPECT_TRUE(worker.reduce(gradient).isfinite().all().item<bool>()) << hook.name;
      }
    });
  }
  run_workers(2, "shm", fp16, [](Worker& worker) {
    const at::Tensor result = worker.reduce(at::tensor({2e5F, worker.rank() == 0 ? 9e4F : 0.F}));
    EXPECT_EQ(result[0].item<float>(), std::numeric_limits<float>::infinity());
    EXPECT_NEAR(result[1].item<float>(), 45000, 32) << "the average fits";
  });
}

TEST(Hooks, OtherDtypesAreAveragedUncompressed) {
  for (const Case& hook : kCases) {
    run_workers(2, "shm", hook.make, [&](Worker& worker) {
      const at::Tensor result = worker.reduce(at::full({300}, 1.0 + 1e-12 * worker.rank(), at::kDouble));
      EXPECT_TRUE(at::equal(result, at::full({300}, 1.0 + 0.5e-12, at::kDouble))) << hook.name;
      EXPECT_THROW(worker.begin(at::zeros({4}).to_sparse()), c10::ValueError);
    });
  }
}

TEST(Hooks, RefuseInvalidOptions) {
  run_workers(2, "shm", all_reduce_hook, [](Worker& worker) {
    const HookGroups alone{test::borrowed(worker.group()), nullptr};
    EXPECT_THROW(int8_hook(alone), c10::ValueError) << "no second group";
    EXPECT_THROW(half_compress_hook(alone, at::kDouble), c10::ValueError);
    EXPECT_THROW(top_k_hook(alone, {.ratio = 0}), c10::ValueError);
    EXPECT_THROW(all_reduce_hook({}), c10::ValueError);
    const HookGroups both{alone.group, alone.group};
    EXPECT_THROW(int8_hook(both, {.block = 100}), c10::ValueError);
    EXPECT_THROW(power_sgd_hook(both, {.rank = 0}), c10::ValueError);
  });
}

TEST(Hooks, FailureOfAnotherRankFailsTheFuture) {
  for (const Case& hook : kCases) {
    std::latch formed(2);  // an abort would also end a group that still forms at the other rank
    run_workers(2, "shm", hook.make, [&](Worker& worker) {
      formed.arrive_and_wait();
      if (worker.rank() == 1) {
        worker.group().abort({ErrorCode::kAborted, "this test ends it", 1});
        return;
      }
      EXPECT_THROW(worker.reduce(normal({40, 60}, 0)), ErrorException) << hook.name;
    });
  }
}

TEST(Hooks, DestructorAbortsPendingReductions) {
  std::promise<void> destroyed;
  run_workers(2, "shm", int8, [&destroyed](Worker& worker) {
    if (worker.rank() == 1) {
      destroyed.get_future().wait();
      static_cast<void>(worker.begin(normal({1000}, 0)));
    } else {
      const auto future = worker.begin(normal({1000}, 0));
      worker.destroy_hook();
      EXPECT_THROW(future->waitAndThrow(), ErrorException);
      destroyed.set_value();
    }
    EXPECT_TRUE(worker.group().barrier().result()) << "what was sent still has its memory";
  });
}

/// The reductions are complete while a callback of one of them still runs, here or at another rank.
TEST(Hooks, DestructorKeepsCompleteReductions) {
  std::latch watched(2);  // counts the ranks that have added their callback
  run_workers(3, "shm", int8, [&watched](Worker& worker) {
    if (worker.rank() == 2) watched.wait();
    const auto future = worker.begin(normal({1000}, 0));
    std::promise<void> destroyed;
    if (worker.rank() != 2) {
      future->addCallback([gone = destroyed.get_future().share()](c10::ivalue::Future&) { gone.wait(); });
      watched.count_down();
    }
    future->wait();
    worker.destroy_hook();
    EXPECT_TRUE(worker.second_group().status()) << worker.second_group().status().error().to_string();
    destroyed.set_value();
    EXPECT_TRUE(worker.group().barrier().result());
  });
}

TEST(Hooks, ErrorIsResetForABucketOfOtherParameters) {
  run_workers(2, "shm", top_k, [](Worker& worker) {
    static_cast<void>(worker.reduce(at::full({100}, 1.0F)));
    EXPECT_TRUE(worker.reduce(at::zeros({100})).any().item<bool>()) << "what was not sent is";
    EXPECT_FALSE(worker.reduce(at::zeros({101})).any().item<bool>());
  });
}

}  // namespace
}  // namespace muster
