// Saves or loads a sharded checkpoint that Python knows as TENSORS in tests/python/test_sharded_checkpoint.py.
//
//   muster run --nproc-per-node 2 --no-python sharded_worker save|load DIRECTORY

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>

#include "muster/base/run_main.h"
#include "muster/torch/collectives.h"
#include "muster/torch/sharded_checkpoint.h"

namespace {

constexpr int64_t kRows = 7, kColumns = 5, kStep = 1'000'000'000'000;

torch::Tensor expected_table() { return torch::arange(kRows * kColumns, torch::kDouble).view({kRows, kColumns}); }
torch::Tensor expected_note() { return torch::tensor({1.5F, -2.F}).to(torch::kBFloat16); }

/// This rank's part of `total`, as torch.chunk() cuts it.
std::pair<int64_t, int64_t> share_of(const muster::GroupSpec& self, int64_t total) {
  const int64_t length = (total + self.size - 1) / self.size;
  const int64_t begin = std::min(total, length * self.rank);
  return {begin, std::min(total, begin + length)};
}

void check(bool right, const std::string& what) {
  if (!right) throw std::runtime_error(what + " is not what was saved");
}

void run(const std::string& action, const std::string& directory) {
  if (action != "save" && action != "load") throw std::invalid_argument("save or load, not " + action);
  const auto group = muster::join_job();
  const bool save = action == "save";
  // Rows are saved and columns are loaded.
  const auto [begin, end] = share_of(group->membership(), save ? kRows : kColumns);
  const torch::Tensor own = expected_table().slice(save ? 0 : 1, begin, end);
  torch::Tensor shard = own.clone(), note = expected_note(), bias = torch::full({}, 3, torch::kInt32);
  int64_t step = kStep;
  torch::nn::Linear layer(2, 3);
  const torch::NoGradGuard no_grad;
  layer->weight.fill_(0.25);
  if (!save) {
    for (torch::Tensor* tensor : {&shard, &note, &bias}) tensor->zero_();
    layer->weight.zero_();
    step = 0;
  }
  muster::checkpoint::ShardedState state;
  state.add("note", note).add("bias", bias).add("step", step).add("layer", *layer);
  state.add_shard("table", shard, {kRows, kColumns}, {save ? begin : 0, save ? 0 : begin});
  if (save) return muster::checkpoint::save_sharded(*group, directory, state);

  muster::checkpoint::load_sharded(*group, directory, state);
  check(shard.equal(own), "the table");
  check(note.equal(expected_note()) && bias.item<int>() == 3 && step == kStep, "the rest");
  check(layer->weight.eq(0.25).all().item<bool>(), "the layer");
  std::printf("rank %d loaded\n", group->membership().rank);
}

}  // namespace

int main(int count, char** words) {
  return muster::run_main([&] { run(count == 3 ? words[1] : "", count == 3 ? words[2] : ""); });
}
