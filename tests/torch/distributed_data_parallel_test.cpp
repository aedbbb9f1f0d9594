#include "muster/torch/nn/distributed_data_parallel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
#include <string>
#include <vector>

#include "group/ranks.h"
#include "muster/torch/collectives.h"
#include "muster/torch/hooks.h"
#include "muster/torch/nn/autocast.h"
#include "torch/models.h"

namespace muster::nn {
namespace {

using test::borrowed, test::expect_alike, test::expect_close, test::make_mlp, test::random_tensor;
using ::testing::HasSubstr;

at::Tensor part_of(const at::Tensor& batch, Group& group) {
  return batch.chunk(group.membership().size)[group.membership().rank];
}

/// Trains on 2 ranks with `options`, and also in one process on the whole batches.
void expect_training_as_one_process(const DistributedDataParallelOptions& options, const char* transport = "shm") {
  test::run_group(2, transport, [&options](Group& group) {
    // The ranks' models differ: DDP must use rank 0's parameters.
    auto model = make_mlp(1 + static_cast<uint64_t>(group.membership().rank));
    auto reference = make_mlp(1);
    DistributedDataParallel ddp(model, borrowed(group), options);
    torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD plain(reference->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (uint64_t step = 0; step < 4; ++step) {
      const at::Tensor batch = random_tensor({8, 6}, step);
      optimizer.zero_grad();
      ddp.forward(part_of(batch, group)).pow(2).mean().backward();
      optimizer.step();
      plain.zero_grad();
      reference->forward(batch).pow(2).mean().backward();
      plain.step();
    }
    expect_close(ddp.parameters(), reference->parameters());
    expect_alike(group, ddp.parameters());
  });
}

TEST(DistributedDataParallel, TrainsAsOneProcessOnTheJoinedBatch) {
  expect_training_as_one_process({});
  expect_training_as_one_process({.bucket_cap_mb = 0.001, .first_bucket_mb = 0.0005});
  expect_training_as_one_process({.bucket_cap_mb_list = {0.0005, 0.001}});
  expect_training_as_one_process({.gradient_as_bucket_view = false});
  expect_training_as_one_process({.find_unused_parameters = true});
  expect_training_as_one_process({.static_graph = true});
  expect_training_as_one_process({.bucket_cap_mb = 0.001, .first_bucket_mb = 0.0005}, "tcp");
}

struct WordsImpl : torch::nn::Module {
  WordsImpl() : words(torch::nn::EmbeddingOptions(10, 4).sparse(true)), last(4, 2) {
    register_module("words", words);
    register_module("last", last);
  }
  at::Tensor forward(const at::Tensor& indices) { return last->forward(words->forward(indices)); }
  torch::nn::Embedding words;
  torch::nn::Linear last;
};

TEST(DistributedDataParallel, AveragesSparseGradientsOfAnEmbedding) {
  test::run_group(2, "shm", [](Group& group) {
    const auto model = std::make_shared<WordsImpl>(), reference = std::make_shared<WordsImpl>();
    DistributedDataParallel ddp(model, borrowed(group));
    {
      const torch::NoGradGuard no_gradients;
      for (size_t i = 0; i < model->parameters().size(); ++i) reference->parameters()[i].copy_(model->parameters()[i]);
    }
    torch::optim::SGD optimizer(ddp.parameters(), 0.1), plain(reference->parameters(), 0.1);
    for (int64_t step = 0; step < 3; ++step) {
      const at::Tensor batch = at::tensor({1, 2, 2, 1, 4, 5, 1, 9}, at::kLong).add(step).remainder(10);
      optimizer.zero_grad();
      ddp.forward(part_of(batch, group)).pow(2).mean().backward();
      plain.zero_grad();
      reference->forward(batch).pow(2).mean().backward();
      ASSERT_TRUE(model->words->weight.grad().is_sparse());
      expect_close({model->words->weight.grad().to_dense(), model->last->weight.grad()},
                   {reference->words->weight.grad().to_dense(), reference->last->weight.grad()});
      optimizer.step();
      plain.step();
    }
    expect_close(ddp.parameters(), reference->parameters());
    expect_alike(group, ddp.parameters());
  });
}

struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    left = register_module("left", torch::nn::Linear(4, 2));
    right = register_module("right", torch::nn::Linear(4, 2));
  }
  std::tuple<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& input, bool go_left) {
    return {input.sum(), {(go_left ? left : right)->forward(input)}};
  }
  torch::nn::Linear left = nullptr, right = nullptr;
};
TORCH_MODULE(Branches);

TEST(DistributedDataParallel, FindsUnusedParametersInAnyOutputType) {
  test::run_group(2, "shm", [](Group& group) {
    torch::manual_seed(1);
    Branches model;
    DistributedDataParallel<Branches> ddp(model, borrowed(group), {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      const bool first = group.membership().rank == 0;
      const auto [sum, outputs] = ddp.forward(at::ones({1, 4}), first);
      outputs.front().sum().backward();
      // One of the two ranks uses each branch, so the average is half of its gradient.
      EXPECT_TRUE(at::equal(model->left->weight.grad(), at::full({2, 4}, 0.5)));
      EXPECT_TRUE(at::equal(model->right->bias.grad(), at::full({2}, 0.5)));
    }
  });
}

struct Opaque {
  at::Tensor tensor;
};
struct OpaqueImpl : torch::nn::Module {
  OpaqueImpl() { linear = register_module("linear", torch::nn::Linear(2, 2)); }
  Opaque forward(const at::Tensor& input) { return {linear->forward(input)}; }
  torch::nn::Linear linear = nullptr;
};

TEST(DistributedDataParallel, RefusesOutputsItCannotSearch) {
  test::run_group(1, "shm", [](Group& group) {
    DistributedDataParallel fine(std::make_shared<OpaqueImpl>(), borrowed(group));
    fine.forward(at::ones({1, 2})).tensor.sum().backward();
    DistributedDataParallel ddp(std::make_shared<OpaqueImpl>(), borrowed(group), {.find_unused_parameters = true});
    EXPECT_THROW(ddp.forward(at::ones({1, 2})), c10::ValueError);
  });
}

TEST(DistributedDataParallel, NoSyncAccumulatesThenReducesTheSum) {
  test::run_group(2, "shm", [](Group& group) {
    auto model = make_mlp(1), reference = make_mlp(1);
    DistributedDataParallel ddp(model, borrowed(group));
    for (int round = 0; round < 2; ++round) {
      ddp.zero_grad();
      reference->zero_grad();
      const at::Tensor first = random_tensor({8, 6}, 1), second = random_tensor({8, 6}, 2);
      const uint64_t before = group.sequence();
      {
        const auto quiet = ddp.no_sync();
        ddp.forward(part_of(first, group)).pow(2).mean().backward();
        EXPECT_EQ(group.sequence(), before);
      }
      ddp.forward(part_of(second, group)).pow(2).mean().backward();
      EXPECT_GT(group.sequence(), before);
      reference->forward(first).pow(2).mean().backward();
      reference->forward(second).pow(2).mean().backward();
      for (size_t i = 0; i < ddp.parameters().size(); ++i) {
        EXPECT_TRUE(at::allclose(ddp.parameters()[i].grad(), reference->parameters()[i].grad(), 1e-4, 1e-6)) << i;
      }
    }
  });
}

TEST(DistributedDataParallel, KeepsBuffersAsRankZeros) {
  for (const bool broadcasts : {true, false}) {
    test::run_group(2, "shm", [broadcasts](Group& group) {
      torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
      DistributedDataParallel ddp(model, borrowed(group), {.broadcast_buffers = broadcasts});
      const auto step = [&](uint64_t seed) {
        const auto rank = static_cast<uint64_t>(group.membership().rank);
        ddp.forward(random_tensor({8, 4}, 2 * seed + rank)).sum().backward();
      };
      step(1);
      step(2);  // forward broadcasts rank 0's running mean; then each rank's data changes it
      ddp.eval();
      const torch::NoGradGuard no_gradients;
      ddp.forward(at::ones({2, 4}));  // broadcasts once more
      const at::Tensor means = all_gather(group, model->named_buffers()["1.running_mean"]);
      EXPECT_EQ(at::equal(means[0], means[1]), broadcasts);
    });
  }
}

TEST(DistributedDataParallel, RunsAHookForEachBucket) {
  test::run_group(2, "shm", [](Group& group) {
    auto model = make_mlp(1), reference = make_mlp(1);
    DistributedDataParallel ddp(model, borrowed(group), {.bucket_cap_mb = 0.001, .first_bucket_mb = 0.001});
    std::vector<size_t> indices;
    const Hook average = all_reduce_hook({borrowed(group)});
    ddp.register_comm_hook([&](c10d::GradBucket& bucket) {
      indices.push_back(bucket.getIndex());
      bucket.getBufferRef().mul_(2);
      return average->runHook(bucket);
    });
    const at::Tensor batch = random_tensor({8, 6}, 1);
    ddp.forward(part_of(batch, group)).pow(2).mean().backward();
    reference->forward(batch).pow(2).mean().backward();
    EXPECT_GT(indices.size(), 1U);
    for (size_t i = 0; i < ddp.parameters().size(); ++i) {
      EXPECT_TRUE(at::allclose(ddp.parameters()[i].grad(), 2 * reference->parameters()[i].grad(), 1e-4, 1e-6)) << i;
    }
  });
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    const at::Tensor shared = torch::eye(4);
    first = register_parameter("first", shared);
    second = register_parameter("second", first);
    unused = register_parameter("frozen", torch::ones({3}), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& input) { return input.mm(first).mm(second); }
  at::Tensor first, second, unused;
};

TEST(DistributedDataParallel, HandlesSharedAndFrozenParameters) {
  test::run_group(2, "shm", [](Group& group) {
    const auto model = std::make_shared<TiedImpl>();
    {
      const torch::NoGradGuard no_gradients;
      model->unused.fill_(group.membership().rank);
    }
    DistributedDataParallel ddp(model, borrowed(group));
    EXPECT_EQ(ddp.reducer().names(), std::vector<std::string>{"first"});
    EXPECT_TRUE(at::equal(model->unused, at::zeros({3})));
    ddp.forward(at::full({1, 4}, static_cast<double>(group.membership().rank))).sum().backward();
    EXPECT_TRUE(at::equal(model->first.grad(), at::full({4, 4}, 1.))) << model->first.grad();
  });
}

TEST(DistributedDataParallel, ReducesFloat32GradientsUnderAutocast) {
  test::run_group(2, "shm", [](Group& group) {
    auto model = make_mlp(1), reference = make_mlp(1);
    DistributedDataParallel ddp(model, borrowed(group));
    const at::Tensor batch = random_tensor({8, 6}, 1);
    const at::Tensor loss = [&] {
      // Threads share libtorch's cache of casts, and one frees what another cast. Libtorch is not instrumented, so
      // ThreadSanitizer does not see what orders the two.
      at::autocast::set_autocast_cache_enabled(false);
      const Autocast autocast(at::kBFloat16);
      const at::Tensor output = ddp.forward(part_of(batch, group));
      EXPECT_EQ(output.scalar_type(), at::kBFloat16);
      return output.pow(2).mean();
    }();
    loss.backward();
    reference->forward(batch).pow(2).mean().backward();
    EXPECT_EQ(model->forward(batch).scalar_type(), at::kFloat) << "the scope is over";
    for (size_t i = 0; i < ddp.parameters().size(); ++i) {
      const at::Tensor gradient = ddp.parameters()[i].grad(), exact = reference->parameters()[i].grad();
      EXPECT_EQ(gradient.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::allclose(gradient, exact, 0.1, 0.02)) << i;
      EXPECT_FALSE(at::equal(gradient, exact)) << i;
      expect_alike(group, {gradient});
    }
  });
}

TEST(DistributedDataParallel, IsAModuleWithTheWrappedOneAsChild) {
  test::run_group(1, "shm", [](Group& group) {
    auto model = make_mlp(1);
    const auto ddp = std::make_shared<DistributedDataParallel<torch::nn::Sequential>>(model, borrowed(group));
    EXPECT_EQ(ddp->module(), model.ptr());
    EXPECT_EQ(ddp->parameters().size(), model->parameters().size());
    EXPECT_EQ(ddp->named_parameters()[0].key(), "module.0.weight");
    ddp->eval();
    EXPECT_FALSE(model->is_training());
    EXPECT_THROW(ddp->clone(), c10::NotImplementedError);

    torch::serialize::OutputArchive out;
    ddp->save(out);
    std::stringstream stream;
    out.save_to(stream);
    torch::serialize::InputArchive in;
    in.load_from(stream);
    auto other = make_mlp(2);
    DistributedDataParallel(other, borrowed(group)).load(in);
    expect_close(other->parameters(), model->parameters());
  });
}

TEST(DistributedDataParallel, RefusesModulesItCannotWrap) {
  test::run_group(2, "shm", [](Group& group) {
    torch::nn::Linear frozen(2, 2);
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
    EXPECT_THROW(DistributedDataParallel(frozen, borrowed(group)), c10::ValueError);
    EXPECT_THROW(DistributedDataParallel(make_mlp(1), borrowed(group), {.bucket_cap_mb = 0}), c10::ValueError);
    EXPECT_THROW(DistributedDataParallel(make_mlp(1), std::shared_ptr<Group>()), c10::ValueError);
    try {
      DistributedDataParallel(make_mlp(1, 6, group.membership().rank == 0 ? 3 : 5), borrowed(group));
      ADD_FAILURE() << "the models differ";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("4.weight"));
    }
  });
}

struct WithBuffersImpl : torch::nn::Module {
  WithBuffersImpl(at::IntArrayRef first, at::IntArrayRef second, int64_t frozen) {
    linear = register_module("linear", torch::nn::Linear(2, 2));
    register_parameter("frozen", torch::ones({frozen}), /*requires_grad=*/false);
    register_buffer("first", torch::zeros(first));
    register_buffer("second", torch::zeros(second));
  }
  at::Tensor forward(const at::Tensor& input) { return linear->forward(input); }
  torch::nn::Linear linear = nullptr;
};

TEST(DistributedDataParallel, NamesTheTensorAndTheRankThatDiffer) {
  test::run_group(3, "shm", [](Group& group) {
    const auto error_of = [&](const std::shared_ptr<WithBuffersImpl>& model) -> std::string {
      try {
        DistributedDataParallel(model, borrowed(group));
        return "";
      } catch (const ErrorException& error) {
        EXPECT_EQ(error.error().rank, 2);
        return error.error().to_string();
      }
    };
    using Shape = std::vector<int64_t>;
    const bool deviates = group.membership().rank == 2;
    // The buffers have as many elements in all, so one broadcast of all buffers would mix them up.
    std::string error = error_of(
        std::make_shared<WithBuffersImpl>(deviates ? Shape{2, 3} : Shape{6}, deviates ? Shape{6} : Shape{2, 3}, 1));
    EXPECT_THAT(error, HasSubstr("buffer 0 differs: rank 2 has first: Float[2, 3], rank 0 has first: Float[6]"));
    error = error_of(std::make_shared<WithBuffersImpl>(Shape{1}, Shape{1}, deviates ? 5 : 4));
    EXPECT_THAT(error, HasSubstr("rank 2 has frozen: Float[5] without gradient, rank 0 has frozen: Float[4] without"));
    const auto model = std::make_shared<WithBuffersImpl>(Shape{1}, Shape{1}, 1);
    if (deviates) model->linear->bias.requires_grad_(false);
    error = error_of(model);
    EXPECT_THAT(error,
                HasSubstr("rank 2 has linear.bias: Float[2] without gradient, rank 0 has linear.bias: Float[2]"));
    EXPECT_EQ(error_of(std::make_shared<WithBuffersImpl>(Shape{1}, Shape{1}, 1)), "");
  });
}

}  // namespace
}  // namespace muster::nn
