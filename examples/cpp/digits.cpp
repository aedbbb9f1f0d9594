// Trains a small convolutional network on handwritten digits with libtorch, with one process for each rank:
//
//   muster run --nproc-per-node 2 --no-python ./digits
//
// Three things make it run on several ranks: join_job(), a DistributedSampler for the loader, and
// DistributedDataParallel around the model. run_main() reports errors. examples/python/digits.py does the same.

#include <muster/base/run_main.h>
#include <muster/torch/collectives.h>
#include <muster/torch/data/distributed_sampler.h>
#include <muster/torch/nn/distributed_data_parallel.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>

#include "digits_table.h"

namespace {

constexpr int64_t kHeldOut = 360;
constexpr int kEpochs = 12;
constexpr size_t kBatch = 64;  // images in a step, over all ranks

using Model = muster::nn::DistributedDataParallel<torch::nn::Sequential>;

struct Digits : torch::data::datasets::Dataset<Digits> {
  torch::Tensor pixels;  // float32[N, 1, 8, 8] in 0..1
  torch::Tensor digits;  // int64[N]

  torch::data::Example<> get(size_t index) override {
    const auto row = static_cast<int64_t>(index);
    return {pixels[row], digits[row]};
  }
  std::optional<size_t> size() const override { return digits.size(0); }
};

Digits digits_of(const torch::Tensor& table, const torch::Tensor& rows) {
  const auto chosen = table.index_select(0, rows);
  Digits result;
  result.pixels = (chosen.narrow(1, 0, kPixels) / 16).reshape({-1, 1, 8, 8});
  result.digits = chosen.select(1, kPixels).to(torch::kLong);
  return result;
}

torch::nn::Sequential make_model() {
  namespace nn = torch::nn;
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)), nn::ReLU(),
                        nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)), nn::ReLU(), nn::MaxPool2d(2),
                        nn::Flatten(), nn::Linear(32 * 4 * 4, 64), nn::ReLU(), nn::Linear(64, 10));
}

/// Makes one pass over this rank's share of the data. Returns the mean loss of all ranks.
template <class Loader>
double train_epoch(Model& model, torch::optim::Optimizer& optimizer, Loader& batches) {
  auto total = torch::zeros({});
  int steps = 0;
  for (auto& batch : batches) {
    optimizer.zero_grad();
    const auto loss = torch::nn::functional::cross_entropy(model.forward(batch.data), batch.target);
    loss.backward();  // averages the gradients over the ranks while it runs
    optimizer.step();
    total += loss.detach();
    ++steps;
  }
  total /= steps;
  muster::all_reduce(*model.group(), total, muster::ReduceOp::kAverage);
  return total.template item<double>();
}

/// Each rank tests its part of the held-out images; the counts are summed.
double accuracy_of(Model& model, const Digits& held_out) {
  const torch::NoGradGuard no_gradients;
  const auto [rank, size] = std::pair{model.group()->membership().rank, model.group()->membership().size};
  const auto mine = torch::arange(rank, held_out.digits.size(0), size);
  const auto guess = model.module()->forward(held_out.pixels.index_select(0, mine)).argmax(1);
  auto right = guess.eq(held_out.digits.index_select(0, mine)).sum();
  muster::all_reduce(*model.group(), right);
  return right.item<double>() / static_cast<double>(held_out.digits.size(0));
}

void train(const std::shared_ptr<muster::Group>& group) {
  const auto [rank, size] = std::pair{group->membership().rank, group->membership().size};
  torch::manual_seed(0);
  const auto table = read_table(DIGITS_DATA);
  const auto order = torch::randperm(table.size(0));
  const auto held_out = digits_of(table, order.narrow(0, 0, kHeldOut));
  auto training = digits_of(table, order.narrow(0, kHeldOut, order.size(0) - kHeldOut));

  muster::data::DistributedSampler sampler(*group, training.size().value());
  const auto batches = torch::data::make_data_loader(training.map(torch::data::transforms::Stack<>()), sampler,
                                                     std::max<size_t>(1, kBatch / static_cast<size_t>(size)));
  Model model(make_model(), group);
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(2e-3));
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    sampler.set_epoch(static_cast<size_t>(epoch));
    const double loss = train_epoch(model, optimizer, *batches);
    const double accuracy = accuracy_of(model, held_out);
    if (rank != 0) continue;
    std::printf("epoch %2d/%d loss %.4f  held-out accuracy %.2f%%\n", epoch, kEpochs, loss, accuracy * 100);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int count, char** words) {
  torch::set_num_threads(1);  // the ranks share the machine
  return muster::run_main([&] {
    if (count > 1) throw std::invalid_argument(std::string("takes no options, not ") + words[1]);
    train(muster::join_job());
  });
}
