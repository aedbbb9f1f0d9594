// Reinforcement learning with actors and a learner, with libtorch and remote calls: balance a pole on a cart.
//
//   muster run --nproc-per-node 3 --no-python ./actor_learner [--updates N]
//
// Rank 0 is the learner, the other ranks are actors. The learner pushes weights to each actor and pulls its experience,
// at the pace of that actor: no actor waits for another one. examples/python/actor_learner.py explains the algorithm,
// and does the same.

#include <muster/base/run_main.h>
#include <muster/store/job_store.h>
#include <muster/torch/rpc/worker.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

namespace rpc = muster::rpc;
using std::chrono_literals::operator""s;

constexpr int64_t kCarts = 16;     // of each actor
constexpr int64_t kSteps = 64;     // of each cart between two pulls
constexpr int64_t kLongest = 500;  // steps of an episode
constexpr double kDiscount = 0.99;
constexpr double kReward = 1 - kDiscount;  // of each step, so that values are between 0 and 1
constexpr double kTrace = 0.95;            // lambda of generalized advantage estimation
constexpr double kClip = 0.2;
constexpr int kPasses = 4;  // over each piece of experience
constexpr double kRate = 3e-3;
constexpr rpc::CallOptions kCall{.timeout = 60s};

/// Carts with a pole, in one tensor. The physics are those of Barto, Sutton and Anderson (1983).
struct CartPole {
  torch::Tensor state = start(kCarts);  // float32[carts, 4]: position, speed, angle, angular speed
  torch::Tensor age = torch::zeros({kCarts});

  static torch::Tensor start(int64_t count) { return torch::empty({count, 4}).uniform_(-0.05, 0.05); }

  /// `action`: int64[carts], 0 pushes to the left and 1 to the right. Returns which poles have fallen, and which
  /// episodes have ended.
  std::pair<torch::Tensor, torch::Tensor> step(const torch::Tensor& action) {
    const auto speed = state.select(1, 1), angle = state.select(1, 2), turning = state.select(1, 3);
    const auto cosine = angle.cos(), sine = angle.sin();
    const auto push = (20.0 * action - 10.0 + 0.05 * turning.square() * sine) / 1.1;
    const auto turn = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3 - 0.1 * cosine.square() / 1.1));
    const auto acceleration = push - 0.05 * turn * cosine / 1.1;
    state = state + 0.02 * torch::stack({speed, acceleration, turning, turn}, 1);
    age += 1;
    const auto fallen = (state.select(1, 0).abs() > 2.4).logical_or(state.select(1, 2).abs() > 12 * M_PI / 180);
    return {fallen, fallen.logical_or(age >= kLongest)};
  }
  void restart(const torch::Tensor& ended) {
    const auto rows = ended.nonzero().select(1, 0);
    state.index_copy_(0, rows, start(rows.size(0)));
    age.index_fill_(0, rows, 0);
  }
};

/// Scores of the two actions, and the value of a state: the discounted return to expect from there.
struct Policy : torch::nn::Module {
  Policy() {
    namespace nn = torch::nn;
    actor = register_module("actor", nn::Sequential(nn::Linear(4, 64), nn::Tanh(), nn::Linear(64, 2)));
    critic = register_module("critic", nn::Sequential(nn::Linear(4, 64), nn::Tanh(), nn::Linear(64, 1)));
  }
  torch::Tensor log_chances(const torch::Tensor& state) { return torch::log_softmax(actor->forward(state), -1); }
  torch::Tensor value(const torch::Tensor& state) { return critic->forward(state).select(-1, 0); }
  /// Copies: the next update changes the weights, perhaps while they are sent.
  std::vector<torch::Tensor> weights() const {
    std::vector<torch::Tensor> copies;
    for (const auto& parameter : parameters()) copies.push_back(parameter.detach().clone());
    return copies;
  }
  void set_weights(const std::vector<torch::Tensor>& weights) {
    const torch::NoGradGuard no_gradients;
    const auto own = parameters();
    for (size_t i = 0; i < own.size(); ++i) own[i].copy_(weights.at(i));
  }

  torch::nn::Sequential actor = nullptr, critic = nullptr;
};

/// Each tensor has the dimensions [kSteps, kCarts], except that there is one more state.
struct Experience {
  torch::Tensor states, actions, chances, falls, ends;
  std::vector<double> returns;  // of the episodes that have ended
  static constexpr auto kFields =
      std::tuple{rpc::field("states", &Experience::states),   rpc::field("actions", &Experience::actions),
                 rpc::field("chances", &Experience::chances), rpc::field("falls", &Experience::falls),
                 rpc::field("ends", &Experience::ends),       rpc::field("returns", &Experience::returns)};
};

/// It has one caller, so it needs no lock.
class Actor {
 public:
  Experience play(const std::vector<torch::Tensor>& weights) {
    const torch::NoGradGuard no_gradients;
    policy_.set_weights(weights);
    std::vector<torch::Tensor> states{carts_.state}, actions, chances, falls, ends;
    Experience experience;
    for (int64_t step = 0; step < kSteps; ++step) {
      const auto log_chances = policy_.log_chances(carts_.state);
      const auto action = log_chances.exp().multinomial(1);
      const auto [fallen, ended] = carts_.step(action.select(1, 0));
      const auto ages = carts_.age.masked_select(ended);
      for (int64_t i = 0; i < ages.size(0); ++i) experience.returns.push_back(ages[i].item<double>());
      carts_.restart(ended);
      states.push_back(carts_.state.clone());
      actions.push_back(action.select(1, 0));
      chances.push_back(log_chances.gather(1, action).select(1, 0));
      falls.push_back(fallen);
      ends.push_back(ended);
    }
    experience.states = torch::stack(states), experience.actions = torch::stack(actions);
    experience.chances = torch::stack(chances), experience.falls = torch::stack(falls);
    experience.ends = torch::stack(ends);
    return experience;
  }

 private:
  CartPole carts_;
  Policy policy_;
};

class Learner {
 public:
  explicit Learner(int updates)
      : updates_(updates), optimizer_(policy_.parameters(), torch::optim::AdamOptions(kRate)) {}

  /// Learns from one actor. There is a thread for each; updates do not overlap.
  void follow(const rpc::Worker& worker, const std::string& actor) {
    while (true) {
      std::vector<torch::Tensor> weights;
      {
        const std::lock_guard lock(mutex_);
        if (done_ >= updates_) return;
        weights = policy_.weights();
      }
      const auto experience = worker.rpc_sync<Experience>(actor, "play", kCall, weights);
      const std::lock_guard lock(mutex_);
      if (done_ >= updates_) return;  // meanwhile, with experience of the other actors
      learn(experience);
    }
  }

 private:
  void learn(const Experience& experience) {
    for (const double one : experience.returns) returns_.push_back(one);
    while (returns_.size() > 100) returns_.pop_front();
    update(experience);
    if (++done_ % 20 != 0 || returns_.empty()) return;
    const double mean = std::accumulate(returns_.begin(), returns_.end(), 0.0) / static_cast<double>(returns_.size());
    std::printf("update %4d: mean return %.1f\n", done_, mean);
    std::fflush(stdout);
  }
  void update(const Experience& experience) {
    auto [advantages, targets] = judge(experience);
    optimizer_.param_groups().front().options().set_lr(kRate * (1 - double(done_) / updates_));
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8);
    const auto states = experience.states.narrow(0, 0, kSteps);
    for (int pass = 0; pass < kPasses; ++pass) {
      const auto log_chances = policy_.log_chances(states);
      const auto chosen = log_chances.gather(2, experience.actions.unsqueeze(2)).select(2, 0);
      const auto ratio = (chosen - experience.chances).exp();
      const auto gain = torch::minimum(ratio * advantages, ratio.clamp(1 - kClip, 1 + kClip) * advantages);
      const auto entropy = -(log_chances.exp() * log_chances).sum(-1);
      const auto loss = 0.5 * (policy_.value(states) - targets).square().mean() - gain.mean() - 0.01 * entropy.mean();
      optimizer_.zero_grad();
      loss.backward();
      optimizer_.step();
    }
  }
  /// How much better each action was than expected, and what the value of its state should have been.
  std::pair<torch::Tensor, torch::Tensor> judge(const Experience& experience) {
    const torch::NoGradGuard no_gradients;
    const auto values = policy_.value(experience.states);
    const auto now = values.narrow(0, 0, kSteps), next = values.narrow(0, 1, kSteps);
    const auto goes_on = experience.ends.logical_not().to(torch::kFloat);
    auto surprise = kReward + kDiscount * goes_on * next - now;
    // The time was up: what would have come next is not known.
    surprise = surprise.masked_fill(experience.ends.logical_and(experience.falls.logical_not()), 0);
    const auto advantages = torch::zeros_like(surprise);
    auto later = torch::zeros({kCarts});
    for (int64_t step = kSteps - 1; step >= 0; --step) {
      later = surprise[step] + kDiscount * kTrace * goes_on[step] * later;
      advantages[step].copy_(later);
    }
    return {advantages, advantages + now};
  }

  const int updates_;
  std::mutex mutex_;  // guards the fields below
  Policy policy_;
  torch::optim::Adam optimizer_;
  int done_ = 0;
  std::deque<double> returns_;
};

void learn(const rpc::Worker& worker, int64_t actors, int updates) {
  Learner learner(updates);
  std::vector<std::thread> threads;
  std::exception_ptr failure;
  std::mutex mutex;  // guards `failure`
  for (int64_t actor = 1; actor <= actors; ++actor) {
    threads.emplace_back([&, actor] {
      try {
        learner.follow(worker, "actor" + std::to_string(actor));
      } catch (...) {
        const std::lock_guard lock(mutex);
        failure = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

void run(int updates) {
  const int rank = muster::value_or_throw(muster::job_number("RANK"));
  const int size = muster::value_or_throw(muster::job_number("WORLD_SIZE"));
  if (size < 2) throw std::invalid_argument("a learner needs actors: start at least two processes");
  torch::manual_seed(rank);
  Actor actor;
  rpc::EndpointOptions options;
  options.name = rank == 0 ? "learner" : "actor" + std::to_string(rank);
  const auto worker = rpc::Worker::join_job(options, [&](rpc::Worker& self) {
    self.add_function("play", [&](const std::vector<torch::Tensor>& weights) { return actor.play(weights); });
  });
  const auto wait_for_all = [&](const char* what) {
    muster::value_or_throw(worker->agent().barrier(what, size, muster::Deadline::after(600s)));
  };
  wait_for_all("joined");
  if (rank == 0) learn(*worker, size - 1, updates);
  wait_for_all("learned");
}

}  // namespace

int main(int count, char** words) {
  torch::set_num_threads(1);  // the ranks share the machine
  return muster::run_main([&] {
    if (count == 1) return run(300);
    const std::string option = words[1], value = count == 3 ? words[2] : "";
    if (option != "--updates" || value.empty() || value.find_first_not_of("0123456789") != std::string::npos) {
      throw std::invalid_argument("takes --updates N, not " + option + " " + value);
    }
    run(std::stoi(value));
  });
}
