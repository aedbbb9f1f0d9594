// Trains a small convolutional network on handwritten digits with libtorch, on as many processes as there are ranks:
//
//   muster run --nproc-per-node 2 --no-python ./digits
//
// Data parallelism by hand: every rank starts from rank 0's weights, learns from its share of each batch, and the
// gradients are averaged over the ranks before the optimizer's step. examples/python/digits.py does the same with DDP.

#include <muster/group/group.h>
#include <muster/store/store.h>
#include <muster/torch/collectives.h>
#include <torch/torch.h>
#include <zlib.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kHeldOut = 360;
constexpr int64_t kPixels = 64;
constexpr int kEpochs = 12;
constexpr int64_t kBatch = 64;  // images a step, over all ranks

struct Images {
  torch::Tensor pixels;  // float32[N, 1, 8, 8] in 0..1
  torch::Tensor digits;  // int64[N]
};

/// float32[N, 65]: the pixels of one image per line, then its digit.
torch::Tensor read_table(const std::string& path) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
  if (!file) throw std::runtime_error("cannot open " + path);
  std::vector<float> numbers;
  char line[4096];
  while (gzgets(file.get(), line, sizeof line) != nullptr) {
    for (const char* at = line; *at != '\0' && *at != '\n';) {
      int number = 0;
      const auto [end, error] = std::from_chars(at, line + sizeof line, number);
      if (error != std::errc()) throw std::runtime_error(path + " holds something that is not a number");
      numbers.push_back(static_cast<float>(number));
      at = *end == ',' ? end + 1 : end;
    }
  }
  return torch::tensor(numbers).reshape({-1, kPixels + 1});
}

Images images_of(const torch::Tensor& table, const torch::Tensor& rows) {
  const auto chosen = table.index_select(0, rows);
  return {(chosen.narrow(1, 0, kPixels) / 16).reshape({-1, 1, 8, 8}), chosen.select(1, kPixels).to(torch::kLong)};
}

torch::nn::Sequential make_model() {
  namespace nn = torch::nn;
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)), nn::ReLU(),
                        nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)), nn::ReLU(), nn::MaxPool2d(2),
                        nn::Flatten(), nn::Linear(32 * 4 * 4, 64), nn::ReLU(), nn::Linear(64, 10));
}

int environment_number(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr)
    throw std::runtime_error(std::string(name) + " is not set: start this program with `muster run`");
  return std::stoi(text);
}

std::unique_ptr<muster::Group> join_the_others(muster::Store& store) {
  const muster::Membership self{.rank = environment_number("RANK"), .size = environment_number("WORLD_SIZE")};
  const auto options = muster::value_or_throw(muster::group_options_from_environment());
  return muster::value_or_throw(muster::Group::form(store, self, options));
}

/// One pass over the images in an order that all ranks draw alike; returns the mean loss of all ranks.
double train_epoch(torch::nn::Sequential& model, torch::optim::Optimizer& optimizer, const Images& training,
                   muster::Group& group, int epoch) {
  const auto [rank, size] = std::pair{group.membership().rank, group.membership().size};
  torch::manual_seed(static_cast<uint64_t>(epoch));
  const auto order = torch::randperm(training.digits.size(0));
  const int64_t share = std::max<int64_t>(1, kBatch / size);
  auto total = torch::zeros({});
  int64_t steps = 0;
  // What does not fill a batch of every rank is left out: all ranks must make the same number of steps.
  for (int64_t first = 0; first + share * size <= order.size(0); first += share * size, ++steps) {
    const auto rows = order.narrow(0, first + rank * share, share);
    optimizer.zero_grad();
    const auto output = model->forward(training.pixels.index_select(0, rows));
    const auto loss = torch::nn::functional::cross_entropy(output, training.digits.index_select(0, rows));
    loss.backward();
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : model->parameters()) gradients.push_back(parameter.grad());
    muster::all_reduce(group, gradients, muster::ReduceOp::kAverage);
    optimizer.step();
    total += loss.detach();
  }
  total /= static_cast<double>(steps);
  muster::all_reduce(group, total, muster::ReduceOp::kAverage);
  return total.item<double>();
}

/// Each rank looks at its part of the held-out images; the counts are summed.
double accuracy_of(torch::nn::Sequential& model, const Images& held_out, muster::Group& group) {
  const torch::NoGradGuard no_gradients;
  const auto [rank, size] = std::pair{group.membership().rank, group.membership().size};
  const auto mine = torch::arange(rank, held_out.digits.size(0), size);
  const auto guess = model->forward(held_out.pixels.index_select(0, mine)).argmax(1);
  auto right = guess.eq(held_out.digits.index_select(0, mine)).sum();
  muster::all_reduce(group, right);
  return right.item<double>() / static_cast<double>(held_out.digits.size(0));
}

void train(muster::Group& group) {
  torch::manual_seed(0);
  const auto table = read_table(DIGITS_DATA);
  const auto order = torch::randperm(table.size(0));
  const auto held_out = images_of(table, order.narrow(0, 0, kHeldOut));
  const auto training = images_of(table, order.narrow(0, kHeldOut, order.size(0) - kHeldOut));

  auto model = make_model();
  for (const auto& parameter : model->parameters()) muster::broadcast(group, parameter.detach());
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(2e-3));
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    const double loss = train_epoch(model, optimizer, training, group, epoch);
    const double accuracy = accuracy_of(model, held_out, group);
    if (group.membership().rank != 0) continue;
    std::printf("epoch %2d/%d loss %.4f  held-out accuracy %.2f%%\n", epoch, kEpochs, loss, accuracy * 100);
    std::fflush(stdout);
  }
}

}  // namespace

int main() {
  torch::set_num_threads(1);  // the ranks share the machine
  try {
    const auto deadline = muster::Deadline::after(muster::Duration(std::chrono::minutes(1)));
    const auto store = muster::value_or_throw(muster::store_from_environment(deadline));
    const auto group = join_the_others(*store);
    train(*group);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "digits: %s\n", error.what());
    return 1;
  }
  return 0;
}
