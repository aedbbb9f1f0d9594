// Trains an embedding table that is sharded over servers, with libtorch and remote calls:
//
//   muster run --nproc-per-node 4 --no-python ./embeddings [--steps N] [--mode sync|async] [--checkpoint FOLDER]
//
// Half of the ranks are servers, each with a part of the rows. The others are trainers: they pull the rows that a batch
// needs, and push gradients of these rows only. In synchronous mode a server applies the mean of all trainers' pushes;
// in asynchronous mode it applies each push at once. With --checkpoint the servers save their rows at the end, and a
// later call goes on from there. examples/python/embeddings.py explains the model, and does the same.

#include <muster/base/run_main.h>
#include <muster/store/job_store.h>
#include <muster/torch/rpc/worker.h>
#include <torch/torch.h>

#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "text.h"

namespace {

namespace rpc = muster::rpc;
using std::chrono_literals::operator""s;

constexpr int64_t kLongest = 5;  // characters in a run
constexpr int64_t kRows = 1 << 16;
constexpr int64_t kBatch = 512;  // characters that each trainer predicts in a step
constexpr double kRate = 0.5;
constexpr rpc::CallOptions kCall{.timeout = 60s};

struct Settings {
  int64_t steps = 300;
  bool synchronous = true;
  std::string checkpoint;  // empty: none
};

const Text& text() {
  static const Text loaded = load_text(CHARS_DATA);
  return loaded;
}

/// The rows of the runs that end before each of these places: int64[places, kLongest].
torch::Tensor row_ids(const torch::Tensor& characters, const torch::Tensor& places) {
  auto hashed = torch::zeros_like(places);
  std::vector<torch::Tensor> columns;
  for (int64_t back = 1; back <= kLongest; ++back) {
    hashed = (hashed * 1'000'003 + characters.index_select(0, places - back) + 1) % 2'147'483'647;
    columns.push_back(hashed % kRows);
  }
  return torch::stack(columns, 1);
}

/// Rows `index`, `index + shards`, `index + 2 * shards` and so on, at a server. Trainers call it from several threads.
class Shard {
 public:
  Shard(int64_t index, int64_t shards, int64_t trainers, const Settings& settings)
      : trainers_(trainers), synchronous_(settings.synchronous) {
    const int64_t count = (kRows - index + shards - 1) / shards;
    rows_ = torch::zeros({count, static_cast<int64_t>(text().alphabet.size())});
    squares_ = torch::zeros({count});
    if (settings.checkpoint.empty()) return;
    std::filesystem::create_directories(settings.checkpoint);
    file_ = settings.checkpoint + "/" + std::to_string(index) + "-of-" + std::to_string(shards) + ".pt";
    if (!std::filesystem::exists(file_)) return;
    std::vector<torch::Tensor> saved;
    torch::load(saved, file_);
    rows_ = saved.at(0), squares_ = saved.at(1), begun_ = saved.at(2).item<int64_t>();
  }

  /// The step from which the checkpoint goes on.
  int64_t begun() const { return begun_; }
  torch::Tensor pull(const torch::Tensor& ids) {
    const std::lock_guard lock(mutex_);
    return rows_.index_select(0, ids);
  }
  /// `ids`: without duplicates. In synchronous mode it returns once all trainers have pushed.
  void push(int64_t trainer, const torch::Tensor& ids, const torch::Tensor& gradients) {
    std::unique_lock lock(mutex_);
    if (!synchronous_) return apply(ids, gradients);
    arrived_[trainer] = {ids, gradients};
    const int64_t round = rounds_;
    if (static_cast<int64_t>(arrived_.size()) == trainers_) {
      apply_mean();
      ++rounds_;
      applied_.notify_all();
    }
    if (!applied_.wait_for(lock, 60s, [&] { return rounds_ > round; })) {
      throw std::runtime_error("the other trainers have not pushed for 60 s");
    }
  }
  void save(int64_t step) {
    const std::lock_guard lock(mutex_);
    torch::save(std::vector<torch::Tensor>{rows_, squares_, torch::tensor(step)}, file_ + ".new");
    std::filesystem::rename(file_ + ".new", file_);
  }

 private:
  void apply_mean() {
    std::vector<torch::Tensor> ids, gradients;
    for (const auto& [trainer, push] : arrived_) {
      ids.push_back(push.first);
      gradients.push_back(push.second);
    }
    arrived_.clear();
    const auto [unique, places, counts] = at::_unique2(torch::cat(ids), true, true);
    const auto total = torch::zeros({unique.size(0), rows_.size(1)}).index_add(0, places, torch::cat(gradients));
    apply(unique, total / static_cast<double>(trainers_));
  }
  /// One step of Adagrad with one learning rate for each row.
  void apply(const torch::Tensor& ids, const torch::Tensor& gradients) {
    squares_.index_add_(0, ids, gradients.square().mean(1));
    const auto rates = kRate / (squares_.index_select(0, ids).sqrt() + 1e-8);
    rows_.index_add_(0, ids, gradients * rates.unsqueeze(1), -1);
  }

  const int64_t trainers_;
  const bool synchronous_;
  std::string file_;
  int64_t begun_ = 0;
  std::mutex mutex_;  // guards the fields below
  torch::Tensor rows_, squares_;
  std::map<int64_t, std::pair<torch::Tensor, torch::Tensor>> arrived_;  // by trainer
  std::condition_variable applied_;
  int64_t rounds_ = 0;
};

/// All rows, for a worker that uses them. The ids that it is given have no duplicates.
class Table {
 public:
  Table(const rpc::Worker& worker, int64_t shards) : worker_(worker), shards_(shards) {}

  torch::Tensor pull(const torch::Tensor& ids) const {
    std::vector<rpc::TypedFuture<torch::Tensor>> pulls;
    std::vector<torch::Tensor> places, rows;
    for (int64_t shard = 0; shard < shards_; ++shard) {
      places.push_back(places_of(ids, shard));
      pulls.push_back(worker_.rpc_async<torch::Tensor>(server(shard), "pull", kCall, local(ids, places.back())));
    }
    for (const auto& pull : pulls) rows.push_back(pull.wait());
    return torch::cat(rows).index_select(0, torch::cat(places).argsort());
  }
  void push(int64_t trainer, const torch::Tensor& ids, const torch::Tensor& gradients) const {
    std::vector<rpc::TypedFuture<void>> pushes;
    for (int64_t shard = 0; shard < shards_; ++shard) {
      const auto own = places_of(ids, shard);
      pushes.push_back(worker_.rpc_async<void>(server(shard), "push", kCall, trainer, local(ids, own),
                                               gradients.index_select(0, own)));
    }
    for (const auto& push : pushes) push.wait();
  }
  int64_t begun() const { return worker_.rpc_sync<int64_t>(server(0), "begun", kCall); }
  void save(int64_t step) const {
    for (int64_t shard = 0; shard < shards_; ++shard) worker_.rpc_sync<void>(server(shard), "save", kCall, step);
  }

 private:
  static std::string server(int64_t shard) { return "server" + std::to_string(shard); }
  torch::Tensor places_of(const torch::Tensor& ids, int64_t shard) const {
    return (ids % shards_ == shard).nonzero().select(1, 0);
  }
  torch::Tensor local(const torch::Tensor& ids, const torch::Tensor& places) const {
    return ids.index_select(0, places).div(shards_, "trunc");
  }

  const rpc::Worker& worker_;
  const int64_t shards_;
};

/// `places`: the rows that each target needs, int64[targets, kLongest].
torch::Tensor loss_of(const torch::Tensor& rows, const torch::Tensor& places, const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(
      rows.index_select(0, places.flatten()).view({places.size(0), kLongest, rows.size(1)}).sum(1), targets);
}

std::pair<torch::Tensor, torch::Tensor> unique_rows(const torch::Tensor& characters, const torch::Tensor& batch) {
  const auto [ids, places, counts] = at::_unique2(row_ids(characters, batch), true, true);
  return {ids, places};
}

double held_out_loss(const Table& table) {
  const auto batch = torch::arange(kLongest, text().held_out.size(0));
  const auto [ids, places] = unique_rows(text().held_out, batch);
  return loss_of(table.pull(ids), places, text().held_out.index_select(0, batch)).item<double>();
}

/// Runs at a trainer.
void train(const Table& table, int64_t trainer, int64_t begun, const Settings& settings) {
  for (int64_t step = begun; step < settings.steps; ++step) {
    torch::manual_seed(1000 * step + trainer);
    const auto batch = torch::randint(kLongest, text().training.size(0), {kBatch});
    const auto [ids, places] = unique_rows(text().training, batch);
    const auto rows = table.pull(ids).requires_grad_();
    loss_of(rows, places, text().training.index_select(0, batch)).backward();
    table.push(trainer, ids, rows.grad());
    if (trainer == 0 && (step + 1) % 100 == 0) {
      std::printf("step %4ld/%ld held-out loss %.4f\n", static_cast<long>(step + 1), static_cast<long>(settings.steps),
                  held_out_loss(table));
      std::fflush(stdout);
    }
  }
}

Settings settings_of(int count, char** words) {
  Settings settings;
  for (int i = 1; i < count; i += 2) {
    const std::string option = words[i], value = i + 1 < count ? words[i + 1] : "";
    if (option == "--steps" && !value.empty() && value.find_first_not_of("0123456789") == std::string::npos) {
      settings.steps = std::stol(value);
    } else if (option == "--mode" && (value == "sync" || value == "async")) {
      settings.synchronous = value == "sync";
    } else if (option == "--checkpoint" && !value.empty()) {
      settings.checkpoint = value;
    } else {
      throw std::invalid_argument("takes --steps N, --mode sync|async and --checkpoint FOLDER, not " + option + " " +
                                  value);
    }
  }
  return settings;
}

void run(const Settings& settings) {
  const int rank = muster::value_or_throw(muster::job_number("RANK"));
  const int size = muster::value_or_throw(muster::job_number("WORLD_SIZE"));
  const int servers = size / 2;
  if (servers == 0) throw std::invalid_argument("there must be a server and a trainer: start at least two processes");
  const int trainers = size - servers, trainer = rank - servers;
  std::unique_ptr<Shard> shard;
  if (rank < servers) shard = std::make_unique<Shard>(rank, servers, trainers, settings);
  rpc::EndpointOptions options;
  options.name = rank < servers ? "server" + std::to_string(rank) : "trainer" + std::to_string(trainer);
  const auto worker = rpc::Worker::join_job(options, [&](rpc::Worker& self) {
    if (!shard) return;
    self.add_function("begun", [&] { return shard->begun(); });
    self.add_function("pull", [&](const torch::Tensor& ids) { return shard->pull(ids); });
    self.add_function("push", [&](int64_t from, const torch::Tensor& ids, const torch::Tensor& gradients) {
      shard->push(from, ids, gradients);
    });
    self.add_function("save", [&](int64_t step) { shard->save(step); });
  });
  const auto wait_for_all = [&](const char* what) {
    muster::value_or_throw(worker->agent().barrier(what, size, muster::Deadline::after(600s)));
  };
  wait_for_all("joined");
  const Table table(*worker, servers);
  if (trainer >= 0) {
    const int64_t begun = table.begun();
    if (trainer == 0) std::printf("begins at step %ld\n", static_cast<long>(begun));
    train(table, trainer, begun, settings);
  }
  wait_for_all("trained");
  if (trainer == 0 && !settings.checkpoint.empty()) table.save(settings.steps);
  wait_for_all("saved");
}

}  // namespace

int main(int count, char** words) {
  torch::set_num_threads(1);  // the ranks share the machine
  return muster::run_main([&] { run(settings_of(count, words)); });
}
