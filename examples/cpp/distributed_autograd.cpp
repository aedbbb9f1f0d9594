// Trains a network whose layers are at several workers, with libtorch, remote calls and distributed autograd:
//
//   muster run --nproc-per-node 4 --no-python ./distributed_autograd
//
// Rank 0 drives. Each other rank is a stage, with one part of the layers. A batch goes through the stages in parts, so
// that the stages work at the same time. The gradients flow back through the calls, and an optimizer updates the
// parameters at each stage.

#include <muster/base/run_main.h>
#include <muster/store/job_store.h>
#include <muster/torch/rpc/autograd.h>
#include <muster/torch/rpc/optimizer.h>
#include <muster/torch/rpc/worker.h>
#include <torch/torch.h>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "digits_table.h"

namespace {

namespace rpc = muster::rpc;
using std::chrono_literals::operator""s;

constexpr int64_t kHeldOut = 360;
constexpr int64_t kWidth = 96;
constexpr int64_t kBatch = 64, kParts = 4;
constexpr int kEpochs = 8;
constexpr rpc::CallOptions kCall{.timeout = 60s};

/// The layers of one stage. Calls run on several threads at a time, which is safe: no call changes a layer.
torch::nn::Sequential make_stage(int64_t stage, int64_t stages) {
  namespace nn = torch::nn;
  torch::manual_seed(stage);
  const bool last = stage == stages - 1;
  nn::Sequential layers(nn::Linear(stage == 0 ? kPixels : kWidth, last ? 10 : kWidth));
  if (!last) layers->push_back(nn::ReLU());
  return layers;
}

void add_functions(rpc::Worker& worker, const torch::nn::Sequential& layers) {
  worker.add_function("forward",
                      [layers = layers.ptr()](const torch::Tensor& input) { return layers->forward(input); });
  worker.add_function("parameters", [layers, &worker] {
    std::vector<rpc::RRef<torch::Tensor>> parameters;
    for (const auto& parameter : layers->parameters()) parameters.push_back(worker.own(parameter));
    return parameters;
  });
}

/// The network, for the worker that drives it.
class Pipeline {
 public:
  Pipeline(const rpc::Worker& worker, int64_t stages) : worker_(worker), stages_(stages) {}

  std::vector<rpc::RRef<torch::Tensor>> parameters() const {
    std::vector<rpc::RRef<torch::Tensor>> all;
    for (int64_t stage = 0; stage < stages_; ++stage) {
      for (auto& one : worker_.rpc_sync<std::vector<rpc::RRef<torch::Tensor>>>(name(stage), "parameters", kCall)) {
        all.push_back(std::move(one));
      }
    }
    return all;
  }
  /// Sends the parts of a batch through the stages. While one stage computes a part, the stage before it computes the
  /// next one.
  torch::Tensor forward(const torch::Tensor& batch) const {
    std::vector<torch::Tensor> parts = batch.chunk(kParts);
    std::vector<rpc::TypedFuture<torch::Tensor>> calls;
    for (const auto& part : parts) calls.push_back(call(0, part));
    for (int64_t stage = 1; stage < stages_; ++stage) {
      for (auto& each : calls) each = call(stage, each.wait());
    }
    for (size_t part = 0; part < parts.size(); ++part) parts[part] = calls[part].wait();
    return torch::cat(parts);
  }

 private:
  static std::string name(int64_t stage) { return "stage" + std::to_string(stage); }
  rpc::TypedFuture<torch::Tensor> call(int64_t stage, const torch::Tensor& input) const {
    return worker_.rpc_async<torch::Tensor>(name(stage), "forward", kCall, input);
  }

  const rpc::Worker& worker_;
  const int64_t stages_;
};

void train(const rpc::Worker& worker, int64_t stages) {
  torch::manual_seed(0);
  const auto table = read_table(DIGITS_DATA).index_select(0, torch::randperm(1797));
  const auto pixels = table.narrow(1, 0, kPixels) / 16, digits = table.select(1, kPixels).to(torch::kLong);
  const int64_t training = table.size(0) - kHeldOut;
  const Pipeline pipeline(worker, stages);
  const rpc::DistributedOptimizer optimizer(worker, "AdamW", pipeline.parameters(), {{"lr", 3e-3}});
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    double total = 0;
    const auto order = torch::randperm(training);
    for (int64_t begin = 0; begin + kBatch <= training; begin += kBatch) {
      const auto rows = order.narrow(0, begin, kBatch);
      const rpc::AutogradScope scope(worker);
      const auto scores = pipeline.forward(pixels.index_select(0, rows));
      const auto loss = torch::nn::functional::cross_entropy(scores, digits.index_select(0, rows));
      scope.backward({loss});
      optimizer.step(scope.id(), kCall);
      total += loss.item<double>();
    }
    const torch::NoGradGuard no_gradients;
    const auto guess = pipeline.forward(pixels.narrow(0, training, kHeldOut)).argmax(1);
    const auto right = guess.eq(digits.narrow(0, training, kHeldOut)).sum().item<double>();
    std::printf("epoch %d/%d loss %.4f  held-out accuracy %.2f%%\n", epoch, kEpochs,
                total / static_cast<double>(training / kBatch), 100 * right / kHeldOut);
    std::fflush(stdout);
  }
}

void run() {
  const int rank = muster::value_or_throw(muster::job_number("RANK"));
  const int size = muster::value_or_throw(muster::job_number("WORLD_SIZE"));
  const int stages = size - 1;
  if (stages == 0) throw std::invalid_argument("a pipeline needs a stage: start at least two processes");
  rpc::EndpointOptions options;
  options.name = rank == 0 ? "driver" : "stage" + std::to_string(rank - 1);
  const auto worker = rpc::Worker::join_job(options, [&](rpc::Worker& self) {
    if (rank > 0) add_functions(self, make_stage(rank - 1, stages));
  });
  const auto wait_for_all = [&](const char* what) {
    muster::value_or_throw(worker->agent().barrier(what, size, muster::Deadline::after(600s)));
  };
  wait_for_all("joined");
  if (rank == 0) train(*worker, stages);
  wait_for_all("trained");
}

}  // namespace

int main(int count, char** words) {
  torch::set_num_threads(1);  // the ranks share the machine
  return muster::run_main([&] {
    if (count > 1) throw std::invalid_argument(std::string("takes no options, not ") + words[1]);
    run();
  });
}
