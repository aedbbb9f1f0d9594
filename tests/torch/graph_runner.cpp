// Runs a package of muster.graph.package() (tests/python/test_graph_runner.py), and prints the sum of its output and
// the microseconds of a run.
//
//   muster run --nproc-per-node 2 --no-python graph_runner FOLDER ROWS COLUMNS [GROUP]

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <string>

#include "muster/base/run_main.h"
#include "muster/torch/collectives.h"
#include "muster/torch/graph/runner.h"

namespace {

constexpr int kRuns = 200;

void run(const std::string& folder, int64_t rows, int64_t columns, const std::string& name) {
  const torch::NoGradGuard no_gradients;
  const auto group = muster::join_job();
  const std::string file = folder + "/rank" + std::to_string(group->membership().rank) + ".pt2";
  muster::graph::Runner model(file, {{name, group}});
  const std::vector<at::Tensor> inputs{torch::ones({rows, columns})};
  const auto outputs = model.run(inputs);
  muster::graph::Runner second(file, {{name, group}});  // has the same group
  if (!torch::equal(second.run(inputs).at(0), outputs.at(0))) throw std::runtime_error("two runners differ");
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kRuns; ++i) model.run(inputs);
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  std::printf("sum %.6f, %.1f us\n", outputs.at(0).sum().item<double>(), took.count() / kRuns);
  std::fflush(stdout);
  muster::barrier(*group);
}

}  // namespace

int main(int count, char** words) {
  torch::set_num_threads(1);  // the ranks share the machine
  return muster::run_main([&] {
    if (count < 4) throw std::invalid_argument("FOLDER ROWS COLUMNS [GROUP]");
    run(words[1], std::stoll(words[2]), std::stoll(words[3]), count > 4 ? words[4] : "world");
  });
}
