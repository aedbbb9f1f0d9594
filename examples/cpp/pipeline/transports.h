// Two ways to bring activations and gradients to the next rank: messages of a group, and remote calls.
#pragma once

#include <muster/torch/collectives.h>
#include <muster/torch/rpc/worker.h>
#include <torch/torch.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "schedules.h"

inline constexpr std::chrono::seconds kDeadline{60};

/// A message is the result of an action. All functions throw if a message fails, or does not come within kDeadline.
class Transport {
 public:
  virtual ~Transport() = default;
  /// Before a step: the result of this action will come from that rank.
  virtual void expect(int64_t sender, const Action& action, at::IntArrayRef shape) = 0;
  virtual torch::Tensor receive(const Action& action) = 0;
  virtual void send(int64_t receiver, const Action& action, const torch::Tensor& result) = 0;
  /// After a step: returns when all messages have left.
  virtual void finish() = 0;
};

/// Messages with a tag for each action, because neighbors send and receive in different orders.
class P2P : public Transport {
 public:
  P2P(muster::Group& group, const Schedule& schedule) : group_(group), schedule_(schedule) {}

  void expect(int64_t sender, const Action& action, at::IntArrayRef shape) override {
    arriving_.emplace(action, muster::async::recv(group_, torch::empty(shape), static_cast<muster::Rank>(sender),
                                                  tag_of(action), {.timeout = kDeadline}));
  }
  torch::Tensor receive(const Action& action) override { return arriving_.extract(action).mapped().wait(); }
  void send(int64_t receiver, const Action& action, const torch::Tensor& result) override {
    leaving_.push_back(muster::async::send(group_, result, static_cast<muster::Rank>(receiver), tag_of(action),
                                           {.timeout = kDeadline}));
  }
  void finish() override {
    for (const auto& work : std::exchange(leaving_, {})) work.wait();
  }

 private:
  uint32_t tag_of(const Action& action) const {
    const int64_t column = action.stage * schedule_.microbatches + action.microbatch;
    return static_cast<uint32_t>(2 * column + (action.pass == Pass::kBackward));
  }

  muster::Group& group_;
  const Schedule& schedule_;
  std::map<Action, muster::AsyncWork> arriving_;
  std::vector<muster::AsyncWork> leaving_;
};

/// Each message is a call of deliver() at the worker `stage<rank>`.
class Rpc : public Transport {
 public:
  /// Joins the job under the name of this rank.
  explicit Rpc(int64_t rank)
      : worker_(muster::rpc::Worker::join_job({.name = name_of(rank)}, [this](muster::rpc::Worker& self) {
          self.add_function("deliver", [this](int64_t pass, int64_t stage, int64_t microbatch, torch::Tensor result) {
            deliver({static_cast<Pass>(pass), stage, microbatch}, std::move(result));
          });
        })) {}

  void expect(int64_t, const Action&, at::IntArrayRef) override {}
  torch::Tensor receive(const Action& action) override {
    std::unique_lock lock(mutex_);
    if (!delivered_.wait_for(lock, kDeadline, [&] { return mailbox_.contains(action); })) {
      throw std::runtime_error("the result of pass " + std::string(1, static_cast<char>(action.pass)) + " of stage " +
                               std::to_string(action.stage) + " did not arrive within 60 s");
    }
    return mailbox_.extract(action).mapped();
  }
  void send(int64_t receiver, const Action& action, const torch::Tensor& result) override {
    leaving_.push_back(worker_->rpc_async<void>(name_of(receiver), "deliver", {.timeout = kDeadline},
                                                static_cast<int64_t>(action.pass), action.stage, action.microbatch,
                                                result));
  }
  void finish() override {
    for (const auto& call : std::exchange(leaving_, {})) call.wait();
  }

 private:
  static std::string name_of(int64_t rank) { return "stage" + std::to_string(rank); }
  void deliver(const Action& action, torch::Tensor result) {
    const std::lock_guard lock(mutex_);
    mailbox_.emplace(action, std::move(result));
    delivered_.notify_all();
  }

  std::mutex mutex_;  ///< guards mailbox_
  std::condition_variable delivered_;
  std::map<Action, torch::Tensor> mailbox_;
  std::vector<muster::rpc::TypedFuture<void>> leaving_;
  std::unique_ptr<muster::rpc::Worker> worker_;  ///< the last field, because its functions use the others
};
