#include "muster/torch/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <mutex>

#include "group/ranks.h"
#include "muster/torch/data/distributed_sampler.h"
#include "muster/torch/exception.h"
#include "muster/torch/optim/zero_redundancy_optimizer.h"
#include "torch/models.h"

namespace muster::checkpoint {
namespace {

using test::make_mlp;
using ::testing::HasSubstr;

class CheckpointTest : public ::testing::Test {
 protected:
  CheckpointTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "muster-checkpoint-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~CheckpointTest() override { std::filesystem::remove_all(folder_); }

  std::string path() const { return folder_ / "a.pt"; }
  size_t files() const { return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder_), {})); }

  std::filesystem::path folder_;
};

/// The message of the error that `body` throws.
template <class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const ErrorException& error) {
    return error.error().message;
  }
  return "nothing was thrown";
}

void train(torch::nn::Sequential& model, torch::optim::Optimizer& optimizer, uint64_t seed) {
  optimizer.zero_grad();
  model->forward(test::random_tensor({8, 6}, seed)).pow(2).sum().backward();
  optimizer.step();
}

TEST_F(CheckpointTest, RestoresTheSavedStateAtAllRanks) {
  std::vector<at::Tensor> expected;
  const auto adam = torch::optim::AdamOptions(0.01);
  test::run_group(2, "shm", [&](Group& group) {
    auto model = make_mlp(1);
    torch::optim::Adam optimizer(model->parameters(), adam);
    train(model, optimizer, 1);
    int64_t epoch = 7;
    double best = 0.25;
    std::string note = "half way";
    at::Tensor counts = at::arange(3);
    data::DistributedSampler sampler(10, 2, group.membership().rank);
    sampler.set_epoch(5);
    State state;
    state.add("model", *model).add("optimizer", optimizer).add("epoch", epoch).add("best", best).add("note", note);
    state.add("counts", counts).add_archived("sampler", sampler);
    save(group, path(), state);
    train(model, optimizer, 2);
    if (group.membership().rank == 0) expected = model->parameters();
  });
  EXPECT_EQ(files(), 1U) << "nothing is left beside the checkpoint";
  test::run_group(3, "shm", [&](Group& group) {
    auto model = make_mlp(99 + static_cast<uint64_t>(group.membership().rank));
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.5));
    int64_t epoch = 0;
    double best = 0;
    std::string note;
    const at::Tensor counts = at::zeros({3}, at::kLong);
    data::DistributedSampler sampler(10, 3, group.membership().rank);
    State state;
    state.add("model", *model).add("optimizer", optimizer).add("epoch", epoch).add("best", best).add("note", note);
    state.add("counts", counts).add_archived("sampler", sampler);
    load(group, path(), state);
    EXPECT_EQ(epoch, 7);
    EXPECT_EQ(best, 0.25);
    EXPECT_EQ(note, "half way");
    EXPECT_TRUE(at::equal(counts, at::arange(3)));
    EXPECT_EQ(sampler.epoch(), 5U);
    train(model, optimizer, 2);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(model->parameters()[i], expected[i])) << i;
  });
}

TEST_F(CheckpointTest, ShardedOptimizerLoadsOnOtherRankCounts) {
  const auto options = torch::optim::AdamWOptions(0.01);
  using Sharded = optim::ZeroRedundancyOptimizer<torch::optim::AdamW>;
  std::vector<at::Tensor> expected;
  std::mutex mutex;
  const auto run = [&](int size, bool first, bool sharded) {
    test::run_group(size, "shm", [&](Group& group) {
      auto model = make_mlp(first ? 1 : 2);
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      if (sharded) {
        optimizer = std::make_unique<Sharded>(test::borrowed(group), model->parameters(), options);
      } else {
        optimizer = std::make_unique<torch::optim::AdamW>(model->parameters(), options);
      }
      State state;
      state.add("model", *model).add("optimizer", *optimizer);
      if (first) {
        train(model, *optimizer, 1);
        save(group, path(), state);
      } else {
        load(group, path(), state);
      }
      train(model, *optimizer, 2);
      const std::lock_guard lock(mutex);
      if (expected.empty()) expected = model->parameters();
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(model->parameters()[i], expected[i])) << i;
    });
  };
  run(3, true, true);
  run(2, false, true);
  run(1, false, false);
}

TEST_F(CheckpointTest, ErrorsReachAllRanksAndNameTheReason) {
  test::run_group(2, "shm", [&](Group& group) {
    auto model = make_mlp(1);
    State state;
    state.add("model", *model);
    EXPECT_THAT(error_of([&] { load(group, path(), state); }), HasSubstr("a.pt: No such file or directory"));
    EXPECT_FALSE(exists(group, path()));
    EXPECT_THAT(error_of([&] { save(group, folder_ / "no" / "a.pt", state); }), HasSubstr("rank 0 could not save"));
    save(group, path(), state);
    EXPECT_TRUE(exists(group, path()));
    // Only rank 0 looks for the file. An unusable path at another rank does not matter.
    const std::string longer = folder_ / std::string(1000, 'a');
    EXPECT_TRUE(exists(group, group.membership().rank == 0 ? path() : longer));
    EXPECT_THAT(error_of([&] { exists(group, group.membership().rank == 0 ? longer : path()); }),
                HasSubstr("File name too long"));

    int64_t epoch = 0;
    State more;
    more.add("epoch", epoch);
    EXPECT_THAT(error_of([&] { load(group, path(), more); }), HasSubstr("could not load 'epoch'"));
    EXPECT_THROW(state.add("model", epoch), c10::ValueError);
    EXPECT_THROW(state.add("", epoch), c10::ValueError);

    // Only rank 1 has another model.
    auto other = make_mlp(1, 6, group.membership().rank == 1 ? 4 : 3);
    State different;
    different.add("model", *other);
    const std::string message = error_of([&] { load(group, path(), different); });
    EXPECT_THAT(message, HasSubstr("rank 1 could not load 'model'"));
    EXPECT_THAT(message, HasSubstr("its '4.weight' is of shape [3, 16], here of [4, 16]"));
  });
}

/// Cannot be saved by a rank that sets `refuses`. Ranks are threads, so the flag is thread_local.
class Unsavable : public torch::optim::SGD {
 public:
  using SGD::SGD;
  void save(torch::serialize::OutputArchive& archive) const override {
    TORCH_CHECK(!refuses, "the optimizer refused");
    SGD::save(archive);
  }
  static thread_local bool refuses;
};
thread_local bool Unsavable::refuses = false;

TEST_F(CheckpointTest, FailedShareFailsAtAllRanks) {
  test::run_group(2, "shm", [&](Group& group) {
    const Rank rank = group.membership().rank;
    auto model = make_mlp(1);
    optim::ZeroRedundancyOptimizer<Unsavable> optimizer(test::borrowed(group), model->parameters(),
                                                        torch::optim::SGDOptions(0.1));
    State state, without;
    state.add("model", *model).add("optimizer", optimizer);
    without.add("model", *model);
    Unsavable::refuses = rank == 1;
    EXPECT_THAT(error_of([&] { save(group, path(), state); }),
                HasSubstr("rank 1 could not save its share of the optimizer: the optimizer refused"));
    Unsavable::refuses = false;
    EXPECT_THAT(error_of([&] { save(group, path(), rank == 1 ? without : state); }),
                HasSubstr("rank 1 has other sharded optimizers in its state: none, rank 0 'optimizer'"));
    EXPECT_EQ(files(), 0U);
    save(group, path(), state);
    EXPECT_TRUE(exists(group, path()));
  });
}

TEST_F(CheckpointTest, LoadsIntoTheTensorsOfTheModule) {
  test::run_group(1, "shm", [&](Group& group) {
    auto model = make_mlp(1);
    State state;
    state.add("model", *model);
    save(group, path(), state);
    const at::Tensor weight = model->parameters().front();
    const at::Tensor expected = weight.detach().clone();
    const auto accumulator = torch::autograd::impl::grad_accumulator(weight);
    {
      const torch::NoGradGuard no_grad;
      weight.zero_();
    }
    load(group, path(), state);
    EXPECT_TRUE(at::equal(weight, expected));
    EXPECT_EQ(torch::autograd::impl::try_get_grad_accumulator(weight), accumulator);
  });
}

TEST_F(CheckpointTest, RefusesATruncatedFile) {
  test::run_group(1, "shm", [&](Group& group) {
    auto model = make_mlp(1);
    State state;
    state.add("model", *model);
    save(group, path(), state);
    std::filesystem::resize_file(path(), std::filesystem::file_size(path()) / 2);
    EXPECT_THAT(error_of([&] { load(group, path(), state); }), HasSubstr("could not load the file of the checkpoint"));
  });
}

/// Saves ones over a checkpoint of zeros, in a child process that may write no more than 100 kB to a file.
int status_of_limited_writer(const std::string& path, void (*on_limit)(int)) {
  const at::Tensor ones = at::ones({1'000'000});  // made before fork(): the child lacks the threads that would fill it
  const pid_t child = ::fork();
  if (child != 0) {
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return status;
  }
  const auto store = memory_store();
  const auto group = Group::form(*store, {0, 1, "child", 0}, test::options_for("tcp"));
  State state;
  state.add("weights", ones);
  const rlimit no_core{0, 0}, limit{100'000, 100'000};
  ::setrlimit(RLIMIT_CORE, &no_core);
  ::setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, on_limit);
  const std::string error = error_of([&] { save(**group, path, state); });
  ::_exit(error.find("File too large") != std::string::npos ? 3 : 4);
}

TEST_F(CheckpointTest, FailedWriteKeepsTheOldCheckpoint) {
  at::Tensor weights = at::zeros({1'000'000});
  State state;
  state.add("weights", weights);
  const auto with_group = [](const std::function<void(Group&)>& body) { test::run_group(1, "shm", body); };
  with_group([&](Group& group) { save(group, path(), state); });

  const int killed = status_of_limited_writer(path(), SIG_DFL);
  EXPECT_TRUE(WIFSIGNALED(killed) && WTERMSIG(killed) == SIGXFSZ) << "status " << killed;
  EXPECT_EQ(files(), 2U) << "it was killed in the middle of the new one";
  const int failed = status_of_limited_writer(path(), SIG_IGN);
  EXPECT_TRUE(WIFEXITED(failed) && WEXITSTATUS(failed) == 3) << "status " << failed;
  EXPECT_EQ(files(), 1U) << "and this one tidied up";

  weights.fill_(5);
  with_group([&](Group& group) { load(group, path(), state); });
  EXPECT_EQ(weights.abs().max().item<float>(), 0);
}

}  // namespace
}  // namespace muster::checkpoint
