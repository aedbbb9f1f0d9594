// Trains a character-level transformer on a play of Shakespeare's with libtorch, with one process for each rank, and
// writes some lines with it:
//
//   muster run --nproc-per-node 2 --no-python ./chars [--steps N] [--checkpoint FILE] [--hook bf16|int8]
//
// Besides DistributedDataParallel it shows what else a longer run needs: an optimizer whose state is sharded over the
// ranks, gradients clipped over all ranks, and checkpoints. A later call of the same command continues from the
// checkpoint, on any number of ranks. For slow links, a hook sends gradients as fewer bytes.

#include <muster/base/run_main.h>
#include <muster/torch/checkpoint.h>
#include <muster/torch/collectives.h>
#include <muster/torch/data/distributed_sampler.h>
#include <muster/torch/hooks.h>
#include <muster/torch/nn/distributed_data_parallel.h>
#include <muster/torch/optim/zero_redundancy_optimizer.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "text.h"
#include "transformer.h"

namespace {

constexpr int64_t kContext = 64;  // characters that the model looks back on
constexpr int64_t kWidth = 96;
constexpr int64_t kHeads = 4;
constexpr int kLayers = 2;
constexpr size_t kBatch = 32;  // pieces of text in a step, over all ranks
constexpr double kPeakRate = 3e-3;
constexpr int64_t kReport = 50;  // steps between two lines of output

struct Settings {
  int64_t steps = 400;
  std::string checkpoint;  // empty: none
  std::string hook;        // empty: gradients are not compressed
};

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(int64_t alphabet) {
    namespace nn = torch::nn;
    embedding = register_module("embedding", Embedding(alphabet, kContext, kWidth));
    blocks = register_module("blocks", nn::Sequential());
    for (int layer = 0; layer < kLayers; ++layer) {
      blocks->push_back(std::make_shared<BlockImpl<nn::Linear>>(kWidth, kHeads));
    }
    blocks->push_back(nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    scores = register_module("scores", nn::Linear(kWidth, alphabet));
  }

  /// Takes int64[batch, length]. Returns a score for each character that may come next: float32[batch, length,
  /// alphabet].
  torch::Tensor forward(const torch::Tensor& input) {
    return scores->forward(blocks->forward(embedding->forward(input)));
  }

  Embedding embedding = nullptr;
  torch::nn::Sequential blocks = nullptr;
  torch::nn::Linear scores = nullptr;
};
TORCH_MODULE(Transformer);

/// The pieces of text that begin at `starts`: int64[starts, kContext + 1].
torch::Tensor stretches(const torch::Tensor& text, const std::vector<size_t>& starts) {
  std::vector<torch::Tensor> rows;
  for (const size_t start : starts) rows.push_back(text.narrow(0, static_cast<int64_t>(start), kContext + 1));
  return torch::stack(rows);
}

template <class Model>
torch::Tensor loss_in(Model& model, const torch::Tensor& rows) {
  return loss_of(model.forward(rows.narrow(1, 0, kContext)), rows.narrow(1, 1, kContext));
}

/// The mean loss over this rank's pieces of the held-out text, averaged over the ranks.
double held_out_loss(TransformerImpl& model, const torch::Tensor& text, muster::Group& group) {
  const torch::NoGradGuard no_gradients;
  const auto [rank, size] = std::pair{group.membership().rank, group.membership().size};
  std::vector<size_t> starts;
  for (int64_t start = rank * kContext; start + kContext < text.size(0); start += 2 * size * kContext) {
    starts.push_back(static_cast<size_t>(start));
  }
  auto loss = loss_in(model, stretches(text, starts));
  muster::all_reduce(group, loss, muster::ReduceOp::kAverage);
  return loss.item<double>();
}

std::string write_lines(TransformerImpl& model, const std::string& alphabet, int characters) {
  const torch::NoGradGuard no_gradients;
  torch::manual_seed(1);
  std::string text = "\n";
  for (int i = 0; i < characters; ++i) {
    std::vector<int64_t> numbers;
    for (const char character : text.substr(text.size() - std::min<size_t>(text.size(), kContext))) {
      numbers.push_back(static_cast<int64_t>(alphabet.find(character)));
    }
    const auto scores = model.forward(torch::tensor(numbers).unsqueeze(0))[0][-1];
    const auto next = torch::softmax(scores / 0.8, 0).multinomial(1).item<int64_t>();
    text += alphabet[static_cast<size_t>(next)];
  }
  return text.substr(1);
}

/// The learning rate: it rises for a twentieth of the steps, then falls along a cosine.
double rate_at(int64_t step, int64_t steps) {
  const double done = static_cast<double>(step) / static_cast<double>(steps);
  return kPeakRate * std::min(done * 20, 0.5 * (1 + std::cos(done * std::acos(-1.0))));
}

muster::Hook make_hook(const std::string& name, const std::shared_ptr<muster::Group>& group) {
  if (name == "bf16") return muster::half_compress_hook({group}, torch::kBFloat16);
  if (name == "int8") return muster::int8_hook(muster::hook_groups(group));
  throw std::invalid_argument("--hook takes bf16 or int8, not " + name);
}

void train(const std::shared_ptr<muster::Group>& group, const Settings& settings) {
  const auto [rank, size] = std::pair{group->membership().rank, group->membership().size};
  const Text text = load_text(CHARS_DATA);
  torch::manual_seed(0);
  Transformer model(static_cast<int64_t>(text.alphabet.size()));
  muster::nn::DistributedDataParallel ddp(model, group);
  if (!settings.hook.empty()) ddp.register_comm_hook(make_hook(settings.hook, group));
  muster::optim::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
      group, ddp.parameters(), torch::optim::AdamWOptions(kPeakRate).weight_decay(0.1));
  muster::data::DistributedSampler sampler(*group, static_cast<size_t>(text.training.size(0) - kContext));

  int64_t step = 0;
  muster::checkpoint::State state;
  state.add("model", *model).add("optimizer", optimizer).add_archived("sampler", sampler).add("step", step);
  if (!settings.checkpoint.empty() && muster::checkpoint::exists(*group, settings.checkpoint)) {
    muster::checkpoint::load(*group, settings.checkpoint, state);
  }
  while (step < settings.steps) {
    const auto starts = sampler.next(std::max<size_t>(1, kBatch / static_cast<size_t>(size)));
    if (!starts) {
      sampler.set_epoch(sampler.epoch() + 1);
      sampler.reset();
      continue;
    }
    ++step;
    optimizer.param_groups().front().options().set_lr(rate_at(step, settings.steps));
    optimizer.zero_grad();
    auto loss = loss_in(ddp, stretches(text.training, *starts));
    loss.backward();
    optimizer.clip_grad_norm_(1);
    optimizer.step();
    if (step % kReport != 0 && step != settings.steps) continue;
    if (!settings.checkpoint.empty()) muster::checkpoint::save(*group, settings.checkpoint, state);
    auto mean = loss.detach();
    muster::all_reduce(*group, mean, muster::ReduceOp::kAverage);
    const double held_out = held_out_loss(*model, text.held_out, *group);
    if (rank != 0) continue;
    std::printf("step %4ld/%ld loss %.3f  held-out loss %.3f\n", static_cast<long>(step),
                static_cast<long>(settings.steps), mean.item<double>(), held_out);
    std::fflush(stdout);
  }
  if (rank == 0) std::printf("\n%s\n", write_lines(*model, text.alphabet, 400).c_str());
}

Settings settings_of(int count, char** words) {
  Settings settings;
  for (int i = 1; i < count; i += 2) {
    const std::string option = words[i], value = i + 1 < count ? words[i + 1] : "";
    if (value.empty() || (option != "--steps" && option != "--checkpoint" && option != "--hook")) {
      throw std::invalid_argument("takes --steps N, --checkpoint FILE and --hook bf16|int8, not " + option + " " +
                                  value);
    }
    if (option == "--steps") {
      if (value.size() > 9 || value.find_first_not_of("0123456789") != std::string::npos) {
        throw std::invalid_argument("--steps takes a number, not " + value);
      }
      settings.steps = std::stol(value);
    } else {
      (option == "--hook" ? settings.hook : settings.checkpoint) = value;
    }
  }
  return settings;
}

}  // namespace

int main(int count, char** words) {
  torch::set_num_threads(1);  // the ranks share the machine
  return muster::run_main([&] {
    const Settings settings = settings_of(count, words);
    train(muster::join_job(), settings);
  });
}
