// Distributed autograd and optimizers in C++: three workers in one process. tests/python/test_rpc_autograd.py has more
// cases, among them faults.
#include "muster/torch/rpc/autograd.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <future>
#include <latch>
#include <thread>

#include "muster/base/random.h"
#include "muster/torch/rpc/optimizer.h"
#include "rpc_workers.h"

namespace muster::rpc {
namespace {

at::Tensor parameter(std::initializer_list<double> values) {
  return at::tensor(at::ArrayRef<double>(values), at::kDouble).requires_grad_();
}

class RpcAutograd : public RpcWorkers {
 protected:
  void SetUp() override {
    b_.add_function("scale", [weight = weight_b_](const at::Tensor& x) { return x * weight; });
    b_.add_function("scale at c", [this](const at::Tensor& x) {
      return b_.rpc_sync<at::Tensor>("c", "scale", {}, x * weight_b_) + x;
    });
    b_.add_function("weight", [this] { return b_.own(weight_b_); });
    c_.add_function("scale", [weight = weight_c_](const at::Tensor& x) { return x * weight; });
    c_.add_function("weight", [this] { return c_.own(weight_c_); });
    c_.add_function("square", [](const at::Tensor& x) { return x * x; });
  }
  const at::Tensor x_ = parameter({1, 2, 3});
  const at::Tensor weight_b_ = parameter({0.5, -1, 2});
  const at::Tensor weight_c_ = parameter({3, 1, -0.25});
};

TEST_F(RpcAutograd, GradientsAreThoseOfOneProcess) {
  at::Tensor found_b, found_c;
  b_.add_function("gradient",
                  [&](int64_t context) { return gradients_of(*b_.autograd()->find(context)).at(0).second; });
  c_.add_function("gradient",
                  [&](int64_t context) { return gradients_of(*c_.autograd()->find(context)).at(0).second; });
  {
    const AutogradScope scope(a_);
    const auto y = a_.rpc_sync<at::Tensor>("b", "scale at c", {}, x_.exp());
    const auto z = a_.remote<at::Tensor>("c", "square", {}, y * x_);
    scope.backward({z.to_here().sum()});
    const at::Tensor found_x = scope.gradient(x_);
    found_b = a_.rpc_sync<at::Tensor>("b", "gradient", {}, scope.id());
    found_c = a_.rpc_sync<at::Tensor>("c", "gradient", {}, scope.id());

    const at::Tensor local = (x_.exp() * weight_b_ * weight_c_ + x_.exp()) * x_;
    const auto expected = ::torch::autograd::grad({(local * local).sum()}, {x_, weight_b_, weight_c_});
    EXPECT_TRUE(at::allclose(found_x, expected[0]));
    EXPECT_TRUE(at::allclose(found_b, expected[1]));
    EXPECT_TRUE(at::allclose(found_c, expected[2]));
    EXPECT_FALSE(x_.grad().defined());
  }
  const Deadline deadline = Deadline::after(10s);
  for (const Worker* worker : {&a_, &b_, &c_}) {
    while (worker->autograd()->count() > 0 && !deadline.passed()) std::this_thread::yield();
    EXPECT_EQ(worker->autograd()->count(), 0) << worker->agent().self().name;
  }
}

/// Tensors that the loss does not use: a result, an argument whose result is dropped, and one further away.
TEST_F(RpcAutograd, UnusedTensorsAreNotWaitedFor) {
  b_.add_function("use one", [this](const at::Tensor& x) {
    const auto unused = b_.rpc_sync<at::Tensor>("c", "scale", {}, x.exp());
    return std::pair{x * weight_b_, unused + x};
  });
  const AutogradScope scope(a_);
  const auto [used, unused] = a_.rpc_sync<std::pair<at::Tensor, at::Tensor>>("b", "use one", {}, x_);
  const auto dropped = a_.rpc_sync<at::Tensor>("c", "scale", {}, used);
  EXPECT_TRUE(unused.requires_grad());
  EXPECT_TRUE(dropped.requires_grad());
  scope.backward({used.sum()}, {.timeout = 30s});
  EXPECT_TRUE(at::allclose(scope.gradient(x_), weight_b_));
  EXPECT_TRUE(gradients_of(*c_.autograd()->find(scope.id())).empty());
}

TEST_F(RpcAutograd, ThreadsHaveContextsOfTheirOwn) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const at::Tensor own = parameter({1.0 + i, 2, 3});
      for (int step = 0; step < 20; ++step) {
        const AutogradScope scope(a_);
        scope.backward({a_.rpc_sync<at::Tensor>("b", "scale at c", {}, own).sum()});
        EXPECT_TRUE(at::allclose(scope.gradient(own), weight_b_ * weight_c_ + 1));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(RpcAutograd, CoroutinesStayInTheirContext) {
  b_.add_function("scale later", [this](const at::Tensor& x) -> Task<at::Tensor> {
    const auto once = co_await b_.rpc_async<at::Tensor>("c", "scale", {}, x * weight_b_);
    co_return co_await b_.rpc_async<at::Tensor>("c", "scale", {}, once);
  });
  const AutogradScope scope(a_);
  scope.backward({a_.rpc_sync<at::Tensor>("b", "scale later", {}, x_).sum()});
  EXPECT_TRUE(at::allclose(scope.gradient(x_), weight_b_ * weight_c_ * weight_c_));
}

TEST_F(RpcAutograd, WrongUse) {
  const AutogradScope scope(a_);
  EXPECT_THROW(scope.backward({at::ones(1)}), ArgumentException);
  EXPECT_THROW(scope.backward({x_}), ArgumentException);
  const auto received = a_.rpc_sync<at::Tensor>("b", "scale", {}, x_);
  EXPECT_THROW(::torch::autograd::backward({received.sum()}, {}), ArgumentException);
  EXPECT_FALSE(scope.gradient(x_).defined());
  scope.backward({received.sum()});
  EXPECT_THROW(scope.backward({received.sum()}), c10::Error);  // the graph was not kept
}

TEST_F(RpcAutograd, OptimizersUpdateParametersWhereTheyAre) {
  const at::Tensor local_b = weight_b_.detach().clone().requires_grad_();
  const at::Tensor local_c = weight_c_.detach().clone().requires_grad_();
  ::torch::optim::SGD local({local_b, local_c}, ::torch::optim::SGDOptions(0.1).momentum(0.9));
  const std::vector<RRef<at::Tensor>> parameters = {a_.rpc_sync<RRef<at::Tensor>>("b", "weight", {}),
                                                    a_.rpc_sync<RRef<at::Tensor>>("c", "weight", {})};
  const DistributedOptimizer optimizer(a_, "SGD", parameters, {{"lr", 0.1}, {"momentum", 0.9}});
  for (int step = 0; step < 5; ++step) {
    const AutogradScope scope(a_);
    scope.backward({a_.rpc_sync<at::Tensor>("b", "scale at c", {}, x_).sum()});
    optimizer.step(scope.id());
    local.zero_grad();
    (x_ * local_b * local_c + x_).sum().backward();
    local.step();
  }
  EXPECT_TRUE(at::allclose(weight_b_, local_b));
  EXPECT_TRUE(at::allclose(weight_c_, local_c));
  EXPECT_THROW(DistributedOptimizer(a_, "SGD", {}, {}), ArgumentException);
  EXPECT_THROW(DistributedOptimizer(a_, "Nothing", parameters, {}), ErrorException);
  EXPECT_THROW(DistributedOptimizer(a_, "SGD", parameters, {{"beta1", 0.9}}), ErrorException);
}

/// Steps of torch's own optimizer in this process, and of the distributed one.
template <class Optimizer, class Options>
void compare(const Worker& a, const at::Tensor& weight, const at::Tensor& x, const std::string& kind,
             const OptimizerOptions& given, const Options& options) {
  const at::Tensor local = weight.detach().clone().requires_grad_();
  Optimizer expected({local}, options);
  const DistributedOptimizer optimizer(a, kind, {a.rpc_sync<RRef<at::Tensor>>("c", "weight", {})}, given);
  for (int step = 0; step < 5; ++step) {
    const AutogradScope scope(a);
    scope.backward({a.rpc_sync<at::Tensor>("c", "scale", {}, x).sum()});
    optimizer.step(scope.id());
    expected.zero_grad();
    (x * local).sum().backward();
    expected.step();
  }
  EXPECT_TRUE(at::equal(weight, local)) << kind << ": " << weight << " is not " << local;
}

TEST_F(RpcAutograd, OptimizersAreThoseOfTorch) {
  namespace optim = ::torch::optim;
  compare<optim::SGD>(a_, weight_c_, x_, "SGD", {{"lr", 0.1}, {"momentum", 0.9}, {"nesterov", 1}},
                      optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
  compare<optim::Adam>(a_, weight_c_, x_, "Adam", {{"lr", 0.1}, {"beta1", 0.8}, {"weight_decay", 0.1}, {"amsgrad", 1}},
                       optim::AdamOptions(0.1).betas({0.8, 0.999}).weight_decay(0.1).amsgrad(true));
  compare<optim::AdamW>(a_, weight_c_, x_, "AdamW", {{"lr", 0.1}, {"weight_decay", 0.1}, {"eps", 1e-6}},
                        optim::AdamWOptions(0.1).weight_decay(0.1).eps(1e-6));
  compare<optim::Adagrad>(a_, weight_c_, x_, "Adagrad", {{"lr", 0.1}, {"lr_decay", 0.5}},
                          optim::AdagradOptions(0.1).lr_decay(0.5));
  compare<optim::RMSprop>(a_, weight_c_, x_, "RMSprop", {{"lr", 0.1}, {"alpha", 0.9}, {"centered", 1}},
                          optim::RMSpropOptions(0.1).alpha(0.9).centered(true));
}

TEST_F(RpcAutograd, AProgramAddsAKindOfOptimizer) {
  add_optimizer("half", [](std::vector<at::Tensor> parameters, const OptimizerOptions& options) {
    return std::make_unique<::torch::optim::SGD>(std::move(parameters),
                                                 ::torch::optim::SGDOptions(options.at("lr") / 2));
  });
  compare<::torch::optim::SGD>(a_, weight_c_, x_, "half", {{"lr", 0.2}}, ::torch::optim::SGDOptions(0.1));
}

TEST_F(RpcAutograd, AnOptimizerThatFailsKeepsTheGradientsOfTheParameters) {
  class Failing final : public ::torch::optim::SGD {
   public:
    using SGD::SGD;
    at::Tensor step(LossClosure) override { throw std::runtime_error("no step"); }
  };
  add_optimizer("failing", [](std::vector<at::Tensor> parameters, const OptimizerOptions&) {
    return std::make_unique<Failing>(std::move(parameters), ::torch::optim::SGDOptions(0.1));
  });
  const at::Tensor own = at::ones({3}, at::kDouble);
  at::Tensor weight = weight_c_;
  weight.mutable_grad() = own;
  const DistributedOptimizer optimizer(a_, "failing", {a_.rpc_sync<RRef<at::Tensor>>("c", "weight", {})}, {});
  const AutogradScope scope(a_);
  scope.backward({a_.rpc_sync<at::Tensor>("c", "scale", {}, x_).sum()});
  EXPECT_THROW(optimizer.step(scope.id()), RemoteException);
  EXPECT_TRUE(weight_c_.grad().is_same(own));
}

TEST_F(RpcAutograd, AStepAfterTheEndOfItsContextIsRefused) {
  const DistributedOptimizer optimizer(a_, "SGD", {a_.rpc_sync<RRef<at::Tensor>>("c", "weight", {})}, {{"lr", 0.1}});
  int64_t ended = 0;
  {
    const AutogradScope scope(a_);
    ended = scope.id();
  }
  EXPECT_THROW(optimizer.step(ended), ErrorException);
}

TEST_F(RpcAutograd, CallsOfACallbackBelongToTheContextInWhichItWasAdded) {
  std::promise<int64_t> seen;
  const auto report = [&] {
    const ContextPtr current = CurrentContext::current();
    seen.set_value(current ? context_id(*current) : 0);
  };
  std::latch gate(1);
  b_.add_function("wait for the gate", [&] { gate.wait(); });
  int64_t expected = 0;
  {
    const AutogradScope scope(a_);
    expected = scope.id();
    a_.rpc_async<void>("b", "wait for the gate", {}).then([&](auto) { report(); });
  }
  gate.count_down();
  EXPECT_EQ(seen.get_future().get(), expected);
}

TEST_F(RpcAutograd, DamagedTensorsOfAContextAreRefused) {
  const ContextPtr sender = a_.autograd()->create();
  ValueWriter out(sender);
  write(out, std::pair{x_ * 2, weight_b_});
  const Message whole = out.take_for("b");
  const ContextPtr context = b_.autograd()->context_of(whole);
  Random random(7);
  int refused = 0;
  for (int round = 0; round < 10'000; ++round) {
    Message damaged = whole;
    damaged.head[random.below(damaged.head.size())] = static_cast<uint8_t>(random.next());
    if (round % 4 == 0) damaged.head.resize(random.below(damaged.head.size()));
    try {
      ValueReader in(damaged, nullptr, 0, context);
      const auto [a, b] = read<std::pair<at::Tensor, at::Tensor>>(in);
      in.finish();
      EXPECT_EQ(a.numel(), 3);
    } catch (const ErrorException&) {
      ++refused;
    } catch (const c10::Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 5'000);
}

/// Calls the functions of references and of autograd with bytes that nobody would send.
TEST_F(RpcAutograd, DamagedMessagesOfProtocolsAreRefused) {
  Random random(9);
  std::vector<Future> calls;
  for (int round = 0; round < 3'000; ++round) {
    for (const char* function : {"muster.autograd.part", "muster.autograd.abort", "muster.autograd.release",
                                 "muster.autograd.exists", "muster.ref.grant", "muster.ref.release", "muster.ref.renew",
                                 "muster.ref.fetch", "muster.ref.wait", "muster.ref.create", "muster.optim.step"}) {
      Message message;
      message.head.resize(random.below(60));
      // Small numbers, so that counts, lengths and flags are often valid.
      for (uint8_t& byte : message.head) byte = static_cast<uint8_t>(random.below(random.chance(0.8) ? 3 : 256));
      calls.push_back(a_.agent().call("b", function, std::move(message), {.timeout = 1s}));
    }
    if (calls.size() < 500) continue;
    for (const Future& call : calls) call.wait();
    calls.clear();
  }
  const AutogradScope scope(a_);
  scope.backward({a_.rpc_sync<at::Tensor>("b", "scale", {}, x_).sum()});
  EXPECT_TRUE(at::allclose(scope.gradient(x_), weight_b_));
}

}  // namespace
}  // namespace muster::rpc
