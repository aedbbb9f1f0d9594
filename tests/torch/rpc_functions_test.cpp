// Remote calls with C++ types: two workers in one process.
#include "muster/torch/rpc/functions.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "muster/base/random.h"
#include "muster/rpc/endpoint.h"

namespace muster::rpc {
namespace {

struct Point {
  double x = 0;
  std::vector<int> tags;
  static constexpr auto kFields = std::tuple{field("x", &Point::x), field("tags", &Point::tags)};
  bool operator==(const Point&) const = default;
};

class RpcFunctions : public testing::Test {
 protected:
  RpcFunctions() {
    EndpointOptions options;
    options.interface = "127.0.0.1";
    for (auto* agent : {&a_, &b_}) {
      options.name = agent == &a_ ? "a" : "b";
      *agent = value_or_throw(start_endpoint(store_, options));
    }
  }
  void TearDown() override {
    for (const auto& agent : {a_, b_}) EXPECT_TRUE(agent->shutdown(Deadline::after(10s)));
  }
  template <class T, class... Args>
  T call(const std::string& function, const Args&... arguments) {
    return rpc_sync<T>(*a_, "b", function, {}, arguments...);
  }

  const std::shared_ptr<Store> store_ = memory_store();
  std::shared_ptr<Agent> a_, b_;
};

TEST_F(RpcFunctions, ValuesComeBackAsTheyWere) {
  const auto check = [this]<class T>(const std::string& name, const T& value) {
    add_function(*b_, name, [](const T& given) { return given; });
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

TEST_F(RpcFunctions, TensorsAreCopied) {
  add_function(*b_, "scaled", [](const at::Tensor& tensor, double by) { return tensor * by; });
  for (const auto& tensor : {at::ones({}), at::ones({0, 3}), at::arange(12).view({3, 4}).t(), at::arange(1 << 18),
                             at::eye(3, at::kDouble), at::ones({2}, at::kBool)}) {
    const auto scaled = call<at::Tensor>("scaled", tensor, 2.0);
    EXPECT_TRUE(scaled.equal(tensor * 2.0)) << tensor.sizes();
  }
  add_function(*b_, "changed", [](at::Tensor tensor) { return tensor.add_(1); });
  const at::Tensor mine = at::ones({100'000});
  EXPECT_TRUE(call<at::Tensor>("changed", mine).equal(mine + 1));
  EXPECT_TRUE(mine.equal(at::ones({100'000})));
  at::Tensor leaf = at::ones({2}).requires_grad_();
  add_function(*b_, "needs_grad", [](const at::Tensor& tensor) { return tensor.requires_grad(); });
  EXPECT_TRUE(call<bool>("needs_grad", leaf));
  EXPECT_THROW(call<bool>("needs_grad", at::eye(2).to_sparse()), c10::NotImplementedError);
}

TEST_F(RpcFunctions, ArgumentsMustFit) {
  add_function(*b_, "add", [](int a, uint8_t b) { return a + b; });
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
  EXPECT_THAT(error_of(1, 256), testing::HasSubstr("256 is out of range"));
  EXPECT_THAT(error_of(1, 2, 3), testing::HasSubstr("expected 2 values, got 3"));
  add_function(*b_, "x_of", [](const Point& point) { return point.x; });
  EXPECT_EQ(call<double>("x_of", Point{2, {}}), 2);
  EXPECT_THROW(call<double>("x_of", std::map<std::string, int>{{"x", 1}}), ErrorException);
  EXPECT_THROW(call<double>("x_of", std::map<std::string, int>{{"x", 1}, {"y", 1}}), ErrorException);
  EXPECT_THROW(call<std::string>("add", 1, 2), ArgumentException) << "the result is an int";
}

TEST_F(RpcFunctions, ExceptionsReachTheCaller) {
  add_function(*b_, "fail", [](int at) { throw std::out_of_range("index " + std::to_string(at)); });
  try {
    call<void>("fail", 7);
    FAIL();
  } catch (const RemoteException& error) {
    EXPECT_EQ(error.type(), "std::out_of_range");
    EXPECT_THAT(error.error().message, testing::HasSubstr("index 7"));
    EXPECT_THAT(error.error().context, testing::HasSubstr("worker \"b\""));
  }
  EXPECT_THROW(call<void>("missing"), ErrorException);
  EXPECT_THROW(add_function(*b_, "fail", [] {}), ErrorException);
}

TEST_F(RpcFunctions, FuturesAndCallbacks) {
  add_function(*b_, "square", [](int x) { return x * x; });
  std::vector<TypedFuture<int>> futures;
  for (int i = 0; i < 100; ++i) futures.push_back(rpc_async<int>(*a_, "b", "square", {}, i));
  for (int i = 0; i < 100; ++i) EXPECT_EQ(futures[i].wait(), i * i);
  std::atomic<int> got = 0;
  const auto future = rpc_async<int>(*a_, "b", "square", {}, 5);
  future.then([&](auto result) { got = result(); });
  future.wait();
  while (got == 0) std::this_thread::yield();
  EXPECT_EQ(got, 25);
  add_function(*b_, "nothing", [] {});
  call<void>("nothing");
}

/// Damaged messages are refused, and never read out of bounds.
TEST_F(RpcFunctions, DamagedValuesAreRefused) {
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
