// Remote calls with C++ types: three workers in one process.
#include "muster/torch/rpc/worker.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <atomic>
#include <latch>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "muster/base/random.h"
#include "muster/torch/rpc/operators.h"
#include "rpc_workers.h"

TORCH_LIBRARY(rpc_worker_test, library) {
  using Counts = c10::Dict<std::string, int64_t>;
  using Results = std::tuple<at::Tensor, std::optional<at::Tensor>, Counts>;
  library.def("kinds(Tensor x, (int, str) pair, Dict(str, int) counts) -> (Tensor, Tensor?, Dict(str, int))",
              [](const at::Tensor& x, const std::tuple<int64_t, std::string>& pair, Counts counts) {
                counts.insert(std::get<1>(pair), std::get<0>(pair));
                return Results(x * 2, std::nullopt, counts);
              });
  library.def("nothing() -> ()", [] {});
}

namespace muster::rpc {
namespace {

struct Point {
  double x = 0;
  std::vector<int> tags;
  static constexpr auto kFields = std::tuple{field("x", &Point::x), field("tags", &Point::tags)};
  bool operator==(const Point&) const = default;
};

class RpcWorker : public RpcWorkers {
 protected:
  template <class T, class... Args>
  T call(const std::string& function, const Args&... arguments) {
    return a_.rpc_sync<T>("b", function, {}, arguments...);
  }
};

TEST_F(RpcWorker, ValuesComeBackAsTheyWere) {
  const auto check = [this]<class T>(const std::string& name, const T& value) {
    b_.add_function(name, [](const T& given) { return given; });
    EXPECT_TRUE(call<T>(name, value) == value) << name;
  };
  check("bool", true);
  check("int", -5);
  check("uint8", uint8_t{200});
  check("int64", std::numeric_limits<int64_t>::min());
  check("double", 0.1);
  check("string", std::string("h\0i", 3));
  check("optional", std::optional<int>());
  check("optional2", std::optional<int>(3));
  check("vector", std::vector<std::string>{"a", ""});
  check("tuple", std::tuple{1, 2.5, std::string("x")});
  check("pair", std::pair{1, std::vector<bool>{true, false}});
  check("map", std::map<std::string, std::vector<double>>{{"a", {1, 2}}, {"b", {}}});
  check("struct", std::vector<Point>{{1.5, {1, 2}}, {}});
}

TEST_F(RpcWorker, TensorsAreCopied) {
  b_.add_function("scaled", [](const at::Tensor& tensor, double by) { return tensor * by; });
  for (const auto& tensor : {at::ones({}), at::ones({0, 3}), at::arange(12).view({3, 4}).t(), at::arange(1 << 18),
                             at::eye(3, at::kDouble), at::ones({2}, at::kBool)}) {
    const auto scaled = call<at::Tensor>("scaled", tensor, 2.0);
    EXPECT_TRUE(scaled.equal(tensor * 2.0)) << tensor.sizes();
  }
  b_.add_function("changed", [](at::Tensor tensor) { return tensor.add_(1); });
  const at::Tensor mine = at::ones({100'000});
  EXPECT_TRUE(call<at::Tensor>("changed", mine).equal(mine + 1));
  EXPECT_TRUE(mine.equal(at::ones({100'000})));
  at::Tensor leaf = at::ones({2}).requires_grad_();
  b_.add_function("needs_grad", [](const at::Tensor& tensor) { return tensor.requires_grad(); });
  EXPECT_TRUE(call<bool>("needs_grad", leaf));
  EXPECT_THROW(call<bool>("needs_grad", at::eye(2).to_sparse()), c10::NotImplementedError);
}

TEST_F(RpcWorker, OperatorsOfTorchAreCalled) {
  for (const std::string name : {"kinds", "nothing"}) {
    ASSERT_TRUE(add_operator(b_.refs(), b_.autograd(), name, "rpc_worker_test::" + name));
  }
  using Counts = std::map<std::string, int>;
  using Results = std::tuple<at::Tensor, std::optional<at::Tensor>, Counts>;
  const auto [doubled, none, counts] = call<Results>("kinds", at::ones({2}), std::tuple(4, "four"), Counts{{"one", 1}});
  EXPECT_TRUE(doubled.equal(at::full({2}, 2.0)));
  EXPECT_FALSE(none);
  EXPECT_EQ(counts, (Counts{{"one", 1}, {"four", 4}}));
  call<std::monostate>("nothing");
  EXPECT_THROW(call<std::monostate>("nothing", 1), ErrorException);
  EXPECT_EQ(add_operator(b_.refs(), b_.autograd(), "kinds", "rpc_worker_test::kinds").error().code,
            ErrorCode::kAlreadyExists);
  EXPECT_EQ(add_operator(b_.refs(), b_.autograd(), "none", "rpc_worker_test::none").error().code, ErrorCode::kNotFound);
}

TEST_F(RpcWorker, ArgumentsMustFit) {
  b_.add_function("add", [](int a, uint8_t b) { return a + b; });
  const auto error_of = [&](const auto&... arguments) -> std::string {
    try {
      call<int>("add", arguments...);
    } catch (const ErrorException& error) {
      return error.error().message;
    }
    return "no error";
  };
  EXPECT_EQ(call<int>("add", 1, 2), 3);
  EXPECT_THAT(error_of(1), testing::HasSubstr("expected 2 values, got 1"));
  EXPECT_THAT(error_of(1, "two"), testing::HasSubstr("expected an int, got a string"));
  EXPECT_THAT(error_of(1, a_.own(2)), testing::HasSubstr("expected an int, got a reference"));
  EXPECT_THAT(error_of(1, 256), testing::HasSubstr("256 is out of range"));
  EXPECT_THAT(error_of(1, 2, 3), testing::HasSubstr("expected 2 values, got 3"));
  b_.add_function("x_of", [](const Point& point) { return point.x; });
  EXPECT_EQ(call<double>("x_of", Point{2, {}}), 2);
  EXPECT_THROW(call<double>("x_of", std::map<std::string, int>{{"x", 1}}), ErrorException);
  EXPECT_THROW(call<double>("x_of", std::map<std::string, int>{{"x", 1}, {"y", 1}}), ErrorException);
  EXPECT_THROW(call<std::string>("add", 1, 2), ArgumentException) << "the result is an int";
}

TEST_F(RpcWorker, ExceptionsReachTheCaller) {
  b_.add_function("fail", [](int at) { throw std::out_of_range("index " + std::to_string(at)); });
  try {
    call<void>("fail", 7);
    FAIL();
  } catch (const RemoteException& error) {
    EXPECT_EQ(error.type(), "std::out_of_range");
    EXPECT_THAT(error.error().message, testing::HasSubstr("index 7"));
    EXPECT_THAT(error.error().context, testing::HasSubstr("worker \"b\""));
  }
  EXPECT_THROW(call<void>("missing"), ErrorException);
  EXPECT_THROW(b_.add_function("fail", [] {}), ErrorException);
}

TEST_F(RpcWorker, FuturesAndCallbacks) {
  b_.add_function("square", [](int x) { return x * x; });
  std::vector<TypedFuture<int>> futures;
  for (int i = 0; i < 100; ++i) futures.push_back(a_.rpc_async<int>("b", "square", {}, i));
  for (int i = 0; i < 100; ++i) EXPECT_EQ(futures[i].wait(), i * i);
  std::atomic<int> got = 0;
  const auto future = a_.rpc_async<int>("b", "square", {}, 5);
  future.then([&](auto result) { got = result(); });
  future.wait();
  while (got == 0) std::this_thread::yield();
  EXPECT_EQ(got, 25);
  b_.add_function("nothing", [] {});
  call<void>("nothing");
}

struct Counter {
  explicit Counter(int from) : count(from) {}
  std::mutex mutex;  // it cannot travel
  int count;
};
using CounterRef = RRef<std::shared_ptr<Counter>>;

TEST_F(RpcWorker, ReferencesToValuesElsewhere) {
  b_.add_function("make", [](int from) { return std::make_shared<Counter>(from); });
  b_.add_function("next", [](const CounterRef& counter) {
    const auto value = *counter.local_value();
    const std::lock_guard lock(value->mutex);
    return ++value->count;
  });
  b_.add_function("square", [](int x) { return x * x; });
  c_.add_function("next_elsewhere",
                  [this](const CounterRef& counter) { return c_.rpc_sync<int>("b", "next", {}, counter); });
  c_.add_function("read", [](const RRef<int>& ref) { return ref.to_here(); });
  c_.add_function("own", [this](int value) { return c_.own(value); });
  {
    const auto counter = a_.remote<std::shared_ptr<Counter>>("b", "make", {}, 5);
    EXPECT_EQ(counter.owner(), "b");
    EXPECT_FALSE(counter.is_owner());
    EXPECT_EQ(call<int>("next", counter), 6);
    EXPECT_EQ(a_.rpc_sync<int>("c", "next_elsewhere", {}, counter), 7);
    EXPECT_THROW((void)counter.local_value(), ArgumentException);
    const auto square = a_.remote<int>("b", "square", {}, 9);
    EXPECT_EQ(square.to_here(), 81);
    EXPECT_EQ(a_.rpc_sync<int>("c", "read", {}, square), 81);
    EXPECT_EQ(a_.rpc_sync<int>("c", "read", {}, a_.own(3)), 3);
    EXPECT_EQ(a_.rpc_sync<RRef<int>>("c", "own", {}, 4).to_here(), 4);
    EXPECT_THROW((void)a_.remote<int>("b", "missing", {}).to_here(), ErrorException);
    std::latch gate(1);
    b_.add_function("wait for the gate", [&] {
      gate.wait();
      return 1;
    });
    const auto late = a_.remote<int>("b", "wait for the gate", {});
    EXPECT_THROW((void)late.to_here({.timeout = 20ms}), ErrorException);
    gate.count_down();
    EXPECT_EQ(late.to_here(), 1);
    EXPECT_THROW(call<void>("make", 5), RemoteException) << "its result cannot travel";
  }
  for (const Worker* worker : {&a_, &b_, &c_}) {
    while (worker->refs()->counts() != std::pair<size_t, size_t>(0, 0)) std::this_thread::yield();
  }
}

/// Damaged messages are refused, and never read out of bounds.
Task<double> average(Worker& worker, std::vector<double> values) {
  double sum = 0;
  for (const double value : values) sum += co_await worker.rpc_async<double>("c", "twice", {}, value);
  co_return sum / static_cast<double>(values.size());
}

TEST_F(RpcWorker, CoroutinesWaitForCalls) {
  c_.add_function("twice", [](double value) {
    if (value < 0) throw std::out_of_range("below 0");
    return 2 * value;
  });
  std::atomic<int> noted = 0;
  b_.add_function("average", [this](std::vector<double> values) { return average(b_, std::move(values)); });
  b_.add_function("rounded", [this](const std::vector<double>& values) -> Task<std::string> {
    const double result = co_await average(b_, values);  // a task waits for a task
    co_return std::to_string(static_cast<int>(result)) + " of " + std::to_string(values.size());
  });
  b_.add_function("note", [this, &noted](double value) -> Task<void> {
    noted += static_cast<int>(co_await b_.rpc_async<double>("c", "twice", {}, value));
  });
  b_.add_function("at once", [](int value) -> Task<int> { co_return value; });
  EXPECT_EQ(call<double>("average", std::vector<double>{1, 2, 3}), 4);
  EXPECT_EQ(call<std::string>("rounded", std::vector<double>{1, 2, 3}), "4 of 3");
  EXPECT_EQ(call<int>("at once", 5), 5);
  call<void>("note", 4.0);
  EXPECT_EQ(noted, 8);
  EXPECT_EQ(a_.remote<double>("b", "average", {}, std::vector<double>{5}).to_here(), 10);
  EXPECT_THAT(
      [&] {
        call<double>("average", std::vector<double>{1, -1});
      },
      testing::ThrowsMessage<RemoteException>(testing::HasSubstr("below 0")));
  EXPECT_THROW(a_.remote<double>("b", "average", {}, std::vector<double>{-1}).to_here(), RemoteException);
}

TEST_F(RpcWorker, CoroutinesThatWaitHoldNoThread) {
  std::mutex mutex;
  std::vector<Responder> kept;
  const auto keep = [&](const Request&, Responder responder) {
    const std::lock_guard lock(mutex);
    kept.push_back(std::move(responder));
  };
  ASSERT_TRUE(c_.agent().add_function("gate", keep, {}));
  b_.add_function("pass", [this](int number) -> Task<int> {
    co_await b_.rpc_async<void>("c", "gate", {});
    co_return number;
  });
  constexpr int kCalls = 1000;  // more than an agent has threads
  std::vector<TypedFuture<int>> calls;
  for (int i = 0; i < kCalls; ++i) calls.push_back(a_.rpc_async<int>("b", "pass", {}, i));
  const Deadline deadline = Deadline::after(20s);
  for (size_t count = 0; count < kCalls && !deadline.passed(); std::this_thread::yield()) {
    const std::lock_guard lock(mutex);
    count = kept.size();
  }
  std::vector<Responder> all;
  {
    const std::lock_guard lock(mutex);
    all.swap(kept);
  }
  EXPECT_EQ(all.size(), kCalls);
  for (Responder& responder : all) responder.reply({});
  for (int i = 0; i < kCalls; ++i) EXPECT_EQ(calls[i].wait(), i);
}

TEST_F(RpcWorker, ATensorInSharedMemoryTravelsByReference) {
  at::Tensor kept;
  b_.add_function("fill", [&kept](const at::Tensor& tensor, double value) {
    tensor.fill_(value);
    kept = tensor;
  });
  b_.add_function("new", [this] { return b_.alias(empty_shared({3}, at::kLong).fill_(4)); });
  at::Tensor shared = empty_shared({2, 3}).zero_();
  a_.rpc_sync<void>("b", "fill", {}, a_.alias(shared), 2.0);
  EXPECT_EQ(shared.sum().item<double>(), 12);
  shared.fill_(5);
  EXPECT_EQ(kept.sum().item<double>(), 30) << "it is the same memory";
  EXPECT_NE(kept.data_ptr(), shared.data_ptr()) << "mapped by the other worker";
  const auto made = a_.rpc_sync<at::Tensor>("b", "new", {});
  EXPECT_EQ(made.sum().item<int64_t>(), 12);
  EXPECT_THROW(a_.alias(at::ones({3})), ArgumentException);
}

TEST_F(RpcWorker, DamagedValuesAreRefused) {
  using Value = std::tuple<at::Tensor, std::map<std::string, std::vector<double>>, Point, std::optional<at::Tensor>>;
  ValueWriter out;
  write(out, Value{at::arange(6).view({2, 3}), {{"a", {1, 2}}}, {1, {3}}, at::ones({2, 0})});
  const Message whole = out.take();
  Random random(5);
  int refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    Message damaged = whole;
    for (int i = 0; i < 1 + round % 3; ++i)
      damaged.head[random.below(damaged.head.size())] = static_cast<uint8_t>(random.next());
    if (round % 4 == 0) damaged.head.resize(random.below(damaged.head.size()));
    try {
      ValueReader in(damaged);
      const auto value = read<Value>(in);
      in.finish();
      EXPECT_GE(std::get<0>(value).sum().item<double>(), -1e300);  // reads all of it
    } catch (const ErrorException&) {
      ++refused;
    } catch (const c10::Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 10'000);
}

}  // namespace
}  // namespace muster::rpc
