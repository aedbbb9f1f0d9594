// Serves a model whose parts are at several ranks to clients in other processes, without Python:
//
//   muster run --nproc-per-node 4 --no-python ./decoder FOLDER [--characters N]
//
// FOLDER has the files of examples/python/decoder.py, one for each part of the model. As many ranks serve the parts.
// The other ranks are clients: each asks for N characters that go on after its own prompt. Clients send their requests
// to rank 0 as remote calls. Rank 0 broadcasts each character to the other parts, and all of them compute the next one.

#include <muster/base/run_main.h>
#include <muster/torch/collectives.h>
#include <muster/torch/graph/runner.h>
#include <muster/torch/rpc/worker.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "text.h"

namespace {

namespace rpc = muster::rpc;
using std::chrono_literals::operator""s;

constexpr size_t kContext = 64;  // characters that the model looks back on, as in examples/python/chars.py
constexpr double kTemperature = 0.8;
constexpr int64_t kEnd = -1;  // instead of a character: there will be no more
constexpr rpc::CallOptions kCall{.timeout = 60s};
const std::vector<std::string> kPrompts{"ROSALIND\t", "ORLANDO\t", "JAQUES\tAll the world's a ", "TOUCHSTONE\t"};

/// One part of the model. All parts take the same steps.
class Part {
 public:
  Part(const std::string& folder, std::shared_ptr<muster::Group> parts)
      : parts_(std::move(parts)),
        model_(folder + "/rank" + std::to_string(parts_->membership().rank) + ".pt2", {{"world", parts_}}) {}

  /// Rank 0 gives the character and its place. Returns the scores of the next character, or null at the end.
  std::optional<torch::Tensor> step(int64_t character = 0, int64_t place = 0) {
    const auto next = torch::tensor({character, place});
    muster::broadcast(*parts_, next);
    if (next[0].item<int64_t>() == kEnd) return std::nullopt;
    return model_.run({next.narrow(0, 0, 1), next.narrow(0, 1, 1)}).at(0);
  }

 private:
  const std::shared_ptr<muster::Group> parts_;
  muster::graph::Runner model_;
};

/// At rank 0. Requests are served one after the other.
class Writer {
 public:
  explicit Writer(Part& part) : part_(part) {}

  /// Goes on after the prompt with `count` characters.
  std::string write(const std::string& prompt, int64_t count) {
    if (prompt.empty()) throw std::invalid_argument("a prompt needs a character");
    for (const char character : prompt) (void)number_of(character);
    const torch::NoGradGuard no_gradients;
    const std::lock_guard lock(mutex_);
    std::string window = prompt, written;
    size_t place = 0;  // of the next character that the model reads
    while (true) {
      if (window.size() > kContext) {  // the model reads the last half again, from its first place on
        window = window.substr(window.size() - kContext / 2);
        place = 0;
      }
      if (static_cast<int64_t>(written.size()) >= count) return written;
      torch::Tensor scores;
      for (; place < window.size(); ++place) {
        scores = *part_.step(number_of(window[place]), static_cast<int64_t>(place));
      }
      const auto next = torch::softmax(scores / kTemperature, 0).multinomial(1).item<int64_t>();
      written += alphabet_.at(static_cast<size_t>(next));
      window += written.back();
    }
  }
  void end() {
    const std::lock_guard lock(mutex_);
    (void)part_.step(kEnd);
  }

 private:
  int64_t number_of(char character) const {
    const size_t found = alphabet_.find(character);
    if (found == std::string::npos) throw std::invalid_argument("the play has no character like this in the prompt");
    return static_cast<int64_t>(found);
  }

  const std::string alphabet_ = load_text(CHARS_DATA).alphabet;
  std::mutex mutex_;  // guards the model
  Part& part_;
};

void ask(const rpc::Worker& worker, int client, int64_t count) {
  const std::string prompt = kPrompts[static_cast<size_t>(client) % kPrompts.size()];
  const auto begin = std::chrono::steady_clock::now();
  const auto written = worker.rpc_sync<std::string>("writer", "write", kCall, prompt, count);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf("%s%s\n(%.0f characters per second)\n", prompt.c_str(), written.c_str(),
              static_cast<double>(count) / took.count());
  std::fflush(stdout);
}

int count_parts(const std::string& folder) {
  int parts = 0;
  while (std::filesystem::exists(folder + "/rank" + std::to_string(parts) + ".pt2")) ++parts;
  if (parts == 0) throw std::invalid_argument(folder + " has no rank0.pt2: run examples/python/decoder.py first");
  return parts;
}

void run(const std::string& folder, int64_t count) {
  const torch::NoGradGuard no_gradients;
  const auto job = muster::join_job();
  const auto [rank, size] = std::pair{job->membership().rank, job->membership().size};
  const int parts = count_parts(folder);
  if (size <= parts) {
    throw std::invalid_argument("start more than " + std::to_string(parts) + " processes: the others are clients");
  }
  std::optional<Part> part;
  if (rank < parts) {
    std::vector<muster::Rank> ranks(static_cast<size_t>(parts));
    std::iota(ranks.begin(), ranks.end(), 0);
    const auto store = muster::value_or_throw(muster::Group::job_store());
    part.emplace(folder, muster::value_or_throw(job->split(*store, ranks, "parts")));
  }
  if (rank > 0 && rank < parts) {
    while (part->step()) {
    }
  } else {
    torch::manual_seed(1);
    std::optional<Writer> writer;
    if (rank == 0) writer.emplace(*part);
    rpc::EndpointOptions options;
    options.name = rank == 0 ? "writer" : "client" + std::to_string(rank - parts);
    const auto worker = rpc::Worker::join_job(options, [&](rpc::Worker& self) {
      if (!writer) return;
      self.add_function("write",
                        [&](const std::string& prompt, int64_t number) { return writer->write(prompt, number); });
    });
    if (rank > 0) ask(*worker, rank - parts, count);
    muster::value_or_throw(worker->agent().barrier("served", size - parts + 1, muster::Deadline::after(600s)));
    if (writer) writer->end();
  }
  muster::barrier(*job);
}

}  // namespace

int main(int count, char** words) {
  torch::set_num_threads(1);  // the ranks share the machine
  return muster::run_main([&] {
    if (count == 2) return run(words[1], 200);
    const std::string value = count == 4 && std::string(words[2]) == "--characters" ? words[3] : "";
    if (value.empty() || value.find_first_not_of("0123456789") != std::string::npos) {
      throw std::invalid_argument("takes FOLDER [--characters N]");
    }
    run(words[1], std::stoll(value));
  });
}
