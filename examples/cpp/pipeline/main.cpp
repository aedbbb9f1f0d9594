// Trains a character-level transformer whose layers are spread over the ranks, with different schedules, and compares
// them:
//
//   muster run --nproc-per-node 2 --no-python ./pipeline [--schedules NAMES] [--steps N] [--microbatches N]
//
// A batch is cut into microbatches, which pass through the ranks' stages one after the other, forward and backward. The
// schedule says in which order. A rank that waits for another one is in a bubble. The table shows the share of the step
// that is such waiting: as measured, and by formula. The messages between the ranks are those of a group (p2p) or
// remote calls (rpc). All train the same model, so the losses are equal. Pictures of the last steps over p2p follow.

#include <muster/base/run_main.h>

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "../text.h"
#include "stages.h"

namespace {

constexpr int64_t kPieces = 4;  // of text in a microbatch
constexpr double kRate = 1e-3;

struct Settings {
  std::vector<std::string> schedules;
  int64_t steps = 10, microbatches = 8;
};

struct Trained {
  double first_loss = 0, last_loss = 0;
  double seconds = 0;  ///< the median step, on the slowest rank
  double last_step = 0;
  torch::Tensor times;  ///< of the last step, float64[ranks, actions, start and end]
};

/// The pieces of text of a step: int64[pieces, kContext + 1]. The step alone determines them.
torch::Tensor batch(const torch::Tensor& text, int64_t step, int64_t pieces) {
  torch::manual_seed(static_cast<uint64_t>(step));
  const auto starts = torch::randint(text.size(0) - kContext, {pieces, 1}, torch::kLong);
  return text.index({starts + torch::arange(kContext + 1)});
}

Trained train(muster::Group& group, const Text& text, const Schedule& schedule, Transport& transport, int64_t steps) {
  Runner runner(schedule, group.membership().rank, static_cast<int64_t>(text.alphabet.size()), transport);
  torch::optim::AdamW optimizer(runner.parameters(), kRate);
  std::vector<double> losses, seconds;
  std::vector<Times> times;
  for (int64_t step = 0; step < steps; ++step) {
    const auto rows = batch(text.training, step, kPieces * schedule.microbatches);
    muster::barrier(group);
    const auto begun = std::chrono::steady_clock::now();
    times = runner.step(rows);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begun;
    const auto maxima = torch::tensor({runner.loss(), taken.count()}, torch::kDouble);
    muster::all_reduce(group, maxima, muster::ReduceOp::kMax);
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(maxima[0].item<double>());
    seconds.push_back(maxima[1].item<double>());
  }
  const double last_step = seconds.back();
  std::ranges::nth_element(seconds, seconds.begin() + steps / 2);
  const auto mine = torch::from_blob(times.data(), {static_cast<int64_t>(times.size()), 2}, torch::kDouble);
  return {losses.front(), losses.back(), seconds[static_cast<size_t>(steps / 2)], last_step,
          muster::all_gather(group, mine)};
}

void print_row(const Schedule& schedule, const char* transport, const Trained& trained) {
  const double busy = (trained.times.select(2, 1) - trained.times.select(2, 0)).sum().item<double>();
  const double bubble = 1 - busy / (static_cast<double>(schedule.ranks()) * trained.last_step);
  std::printf("%-12s  %-9s   %.4f  %.4f     %6.1f ms   %5.1f%%  %5.1f%%\n", schedule.name.c_str(), transport,
              trained.first_loss, trained.last_loss, 1e3 * trained.seconds, 100 * bubble,
              100 * schedule.expected_bubble());
  std::fflush(stdout);
}

/// A line for each rank: F, B and W where it runs such a pass, and a dot where it waits.
std::string picture_of(const Schedule& schedule, const torch::Tensor& times) {
  constexpr double kColumns = 100;
  const auto last = times.max().item<double>();
  std::string picture = schedule.name + "\n";
  for (int64_t rank = 0; rank < schedule.ranks(); ++rank) {
    std::string line(static_cast<size_t>(kColumns), '.');
    const Actions& order = schedule.orders[static_cast<size_t>(rank)];
    for (size_t number = 0; number < order.size(); ++number) {
      const auto taken = times[rank][static_cast<int64_t>(number)];
      const auto begin = static_cast<size_t>(taken[0].item<double>() / last * kColumns);
      const auto end = static_cast<size_t>(taken[1].item<double>() / last * kColumns);
      std::fill(line.begin() + static_cast<int64_t>(begin), line.begin() + static_cast<int64_t>(end),
                static_cast<char>(order[number].pass));
    }
    picture += "rank " + std::to_string(rank) + "  " + line + "\n";
  }
  return picture;
}

void compare(const Settings& settings) {
  const auto group = muster::join_job();
  const int64_t rank = group->membership().rank, size = group->membership().size;
  if (size > kLayers / 2) throw std::invalid_argument("start 1 to 4 processes, not " + std::to_string(size));
  std::vector<Schedule> schedules;
  for (const auto& name : settings.schedules) {
    schedules.push_back(make_schedule(name, size, settings.microbatches));
  }
  const Text text = load_text(CHARS_DATA);
  Rpc rpc(rank);
  std::string pictures;
  if (rank == 0) std::printf("schedule      messages    loss, first and last   step     bubble  by formula\n");
  for (const auto& schedule : schedules) {
    P2P p2p(*group, schedule);
    const auto by_group = train(*group, text, schedule, p2p, settings.steps);
    const auto by_calls = train(*group, text, schedule, rpc, settings.steps);
    if (rank != 0) continue;
    print_row(schedule, "p2p", by_group);
    print_row(schedule, "rpc", by_calls);
    pictures += "\n" + picture_of(schedule, by_group.times);
  }
  if (rank == 0) std::printf("%s", pictures.c_str());
  muster::barrier(*group);  // no rank leaves while another one calls it
}

int64_t number_of(const std::string& option, const std::string& value) {
  const bool is_number = value.size() < 10 && value.find_first_not_of("0123456789") == std::string::npos;
  if (!is_number || std::stol(value) == 0) {
    throw std::invalid_argument(option + " takes a number from 1 on, not " + value);
  }
  return std::stol(value);
}

Settings settings_of(int count, char** words) {
  Settings settings;
  std::string schedules = "gpipe,1f1b,interleaved,zero-bubble";
  for (int i = 1; i < count; i += 2) {
    const std::string option = words[i], value = i + 1 < count ? words[i + 1] : "";
    if (value.empty() || (option != "--schedules" && option != "--steps" && option != "--microbatches")) {
      throw std::invalid_argument("takes --schedules NAMES, --steps N and --microbatches N, not " + option + " " +
                                  value);
    }
    if (option == "--schedules") schedules = value;
    if (option == "--steps") settings.steps = number_of(option, value);
    if (option == "--microbatches") settings.microbatches = number_of(option, value);
  }
  std::istringstream names(schedules);
  for (std::string name; std::getline(names, name, ',');) settings.schedules.push_back(name);
  return settings;
}

}  // namespace

int main(int count, char** words) {
  torch::set_num_threads(1);  // the ranks share the machine
  return muster::run_main([&] { compare(settings_of(count, words)); });
}
