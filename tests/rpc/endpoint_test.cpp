// Workers as endpoints in one process, over every transport.
#include "muster/rpc/endpoint.h"

#include <atomic>
#include <future>
#include <mutex>
#include <numeric>
#include <thread>

#include "rpc/workers.h"

namespace muster::rpc::test {
namespace {

class RpcEndpoint : public testing::TestWithParam<const char*> {
 protected:
  void TearDown() override {
    for (const auto& agent : {a_, b_}) {
      const auto left = agent->shutdown(Deadline::after(kPatience));
      EXPECT_TRUE(left) << left.error().to_string();
    }
  }
  static void add(const std::shared_ptr<Agent>& agent, const std::string& name, Handler handler) {
    ASSERT_TRUE(agent->add_function(name, std::move(handler), {}));
  }

  const std::shared_ptr<Store> store_ = memory_store();
  const std::shared_ptr<Agent> a_ = test::start(store_, options_for("a", GetParam()));
  const std::shared_ptr<Agent> b_ = test::start(store_, options_for("b", GetParam()));
};

TEST_P(RpcEndpoint, ReturnsHeadAndSegmentsOfEverySize) {
  add(b_, "echo", echo);
  for (const size_t bytes : {0, 1, 1000, 16384, 16385, 65536, 1 << 20, 40'000'001}) {
    Message message;
    message.head.assign(bytes / 2, 1);
    for (const size_t part : {bytes, size_t{3}, bytes / 3}) {
      message.segments.push_back(Buffer::allocate(part));
      std::iota(message.segments.back().data(), message.segments.back().data() + part, uint8_t(part));
    }
    const Message back = result_of(a_->call("b", "echo", message, {}));
    EXPECT_EQ(back.head, message.head);
    ASSERT_EQ(back.segments.size(), 3);
    for (int i = 0; i < 3; ++i) {
      EXPECT_NE(back.segments[i].data(), message.segments[i].data());
      EXPECT_TRUE(std::ranges::equal(back.segments[i].view(), message.segments[i].view())) << bytes << ", " << i;
    }
  }
}

TEST_P(RpcEndpoint, ThousandsOfCallsInFlightGetTheirOwnResults) {
  add(b_, "echo", echo);
  std::vector<Future> futures;
  for (int i = 0; i < 20'000; ++i) futures.push_back(a_->call("b", "echo", text(std::to_string(i)), {}));
  for (int i = 0; i < 20'000; ++i) ASSERT_EQ(text(result_of(futures[i])), std::to_string(i));
}

TEST_P(RpcEndpoint, ManyThreadsMayCall) {
  add(a_, "echo", echo);
  add(b_, "echo", echo);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&, thread] {
      const auto& from = thread % 2 == 0 ? a_ : b_;
      for (int i = 0; i < 500; ++i) {
        const std::string words = std::to_string(thread) + "/" + std::to_string(i);
        EXPECT_EQ(text(result_of(from->call(thread % 2 == 0 ? "b" : "a", "echo", text(words), {}))), words);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(RpcEndpoint, ReportsTheHandlersErrorWithItsTraceback) {
  add(b_, "fails", [](Request, Responder responder) {
    responder.fail({{ErrorCode::kInternal, "no such row: 7", kNoRank, {}}, "KeyError", "File x, line 3"});
  });
  const CallError error = error_of(a_->call("b", "fails", {}, {}));
  EXPECT_EQ(error.type, "KeyError");
  EXPECT_EQ(error.traceback, "File x, line 3");
  EXPECT_EQ(error.error.message, "no such row: 7");
  EXPECT_EQ(error.error.context, "call of \"fails\" at worker \"b\" (request 1)") << "as the logs of calls name it";
}

TEST_P(RpcEndpoint, NamesTheFunctionsThatThereAre) {
  add(b_, "push", echo);
  add(b_, "pull", echo);
  const CallError error = error_of(a_->call("b", "pusch", {}, {}));
  EXPECT_EQ(error.error.code, ErrorCode::kNotFound);
  EXPECT_EQ(error.error.message, "there is no function \"pusch\" (there are: pull, push)");
}

TEST_P(RpcEndpoint, AFallbackGetsAllOtherNames) {
  add(b_, "known", [](Request, Responder responder) { responder.reply(text("known")); });
  ASSERT_TRUE(
      b_->add_fallback([](Request request, Responder responder) { responder.reply(text(request.function)); }, {}));
  EXPECT_EQ(text(result_of(a_->call("b", "known", {}, {}))), "known");
  EXPECT_EQ(text(result_of(a_->call("b", "other", {}, {}))), "other");
  EXPECT_EQ(b_->add_fallback(echo, {}).error().code, ErrorCode::kAlreadyExists);
  EXPECT_EQ(b_->add_function("known", echo, {}).error().code, ErrorCode::kAlreadyExists);
}

TEST_P(RpcEndpoint, AResponderThatIsDroppedFailsTheCall) {
  add(b_, "forgets", [](Request, Responder) {});
  const CallError error = error_of(a_->call("b", "forgets", {}, {}));
  EXPECT_EQ(error.error.message, "the function ended without a result");
}

TEST_P(RpcEndpoint, AnswersFromAnyThread) {
  std::vector<std::thread> threads;
  std::mutex mutex;
  add(b_, "later", [&](Request request, Responder responder) {
    const std::lock_guard lock(mutex);
    threads.emplace_back([arguments = std::move(request.arguments), responder = std::move(responder)]() mutable {
      responder.reply(std::move(arguments));
    });
  });
  for (int i = 0; i < 50; ++i) EXPECT_EQ(text(result_of(a_->call("b", "later", text("x"), {}))), "x");
  const std::lock_guard lock(mutex);
  for (std::thread& thread : threads) thread.join();
}

TEST_P(RpcEndpoint, KnowsTheCaller) {
  add(b_, "who", [](Request request, Responder responder) { responder.reply(text(request.from.to_string())); });
  EXPECT_EQ(text(result_of(a_->call("b", "who", {}, {}))), "worker \"a\" (id 0)");
}

/// a -> b -> a -> b ... to this depth, with one handler at each.
TEST_P(RpcEndpoint, NestedCallsNeedNoFreeHandler) {
  for (const auto& [agent, other] : {std::pair(a_, "b"), std::pair(b_, "a")}) {
    add(agent, "nest", [agent = agent.get(), other = std::string(other)](Request request, Responder responder) {
      request.arguments.head.pop_back();
      if (request.arguments.head.empty()) return responder.reply(text("bottom"));
      responder.finish(agent->call(other, "nest", std::move(request.arguments), {}).wait());
    });
  }
  EXPECT_EQ(text(result_of(a_->call("b", "nest", text(std::string(60, 'x')), {}))), "bottom");
  std::vector<Future> futures;
  for (int i = 0; i < 20; ++i) futures.push_back(a_->call("b", "nest", text(std::string(5, 'x')), {}));
  for (const Future& future : futures) EXPECT_EQ(text(result_of(future)), "bottom");
}

/// Both workers have more calls under way than fit in a window, and each of these needs a call in the other direction.
TEST_P(RpcEndpoint, NestedCallsEndThoughBothWindowsAreFull) {
  for (const auto& agent : {a_, b_}) {
    add(agent, "size", [](const Request& request, Responder responder) {
      responder.reply(text(std::to_string(request.arguments.segments.at(0).view().size())));
    });
  }
  for (const size_t bytes : {size_t{0}, size_t{100'000}, size_t{kMaxBytesInFlight / 3}}) {
    const std::string function = "nest " + std::to_string(bytes);
    const auto large = [bytes] { return Message{{}, {Buffer::allocate(bytes)}}; };
    for (const auto& [agent, other] : {std::pair(a_, "b"), std::pair(b_, "a")}) {
      add(agent, function, [=, agent = agent.get(), other = std::string(other)](Request, Responder given) {
        const auto responder = std::make_shared<Responder>(std::move(given));
        agent->call(other, "size", large(), {}).then([responder](const CallResult& result) {
          responder->finish(result);
        });
      });
    }
    const int count = bytes == 0 ? kMaxCallsInFlight + 1000 : static_cast<int>(kMaxBytesInFlight / bytes) + 3;
    std::vector<Future> futures;
    for (int i = 0; i < count; ++i) {
      futures.push_back(a_->call("b", function, large(), {}));
      futures.push_back(b_->call("a", function, large(), {}));
    }
    for (const Future& future : futures) EXPECT_EQ(text(result_of(future)), std::to_string(bytes));
  }
}

TEST_P(RpcEndpoint, CallsItselfWithCopiesOfTheSegments) {
  add(a_, "echo", echo);
  Message message;
  message.segments.push_back(Buffer::copy_of(to_bytes("data")));
  const Message back = result_of(a_->call("a", "echo", message, {}));
  ASSERT_EQ(back.segments.size(), 1);
  EXPECT_NE(back.segments[0].data(), message.segments[0].data());
  EXPECT_EQ(muster::to_string(back.segments[0].view()), "data");
}

TEST_P(RpcEndpoint, OneWayCallsEndWhenTheFunctionStarts) {
  std::atomic<int> runs = 0;
  std::mutex gate;
  std::unique_lock closed(gate);
  add(b_, "count", [&](Request, Responder responder) {
    const std::lock_guard wait(gate);
    ++runs;
    responder.reply({});
  });
  std::vector<Future> futures;
  for (int i = 0; i < 10; ++i) futures.push_back(a_->call("b", "count", {}, {.one_way = true}));
  for (const Future& future : futures) (void)result_of(future);
  EXPECT_EQ(runs, 0);
  closed.unlock();
  EXPECT_TRUE(b_->shutdown(Deadline::after(kPatience)));
  EXPECT_EQ(runs, 10);
}

TEST_P(RpcEndpoint, RunsCallbacks) {
  add(b_, "echo", echo);
  std::promise<std::string> got;
  const Future future = a_->call("b", "echo", text("x"), {});
  future.then([&](const CallResult& result) { got.set_value(text(*result)); });
  EXPECT_EQ(got.get_future().get(), "x");
  bool at_once = false;
  future.then([&](const CallResult&) { at_once = true; });
  EXPECT_TRUE(at_once);
}

TEST_P(RpcEndpoint, ResultsArriveThatWereSentBeforeTheWorkerLeft) {
  for (int round = 0; round < 40; ++round) {
    constexpr int kCalls = 50;
    const std::string name = "c" + std::to_string(round);
    const auto leaving = test::start(store_, options_for(name, GetParam()));
    std::atomic<int> begun = 0;
    add(leaving, "count", [&](Request request, Responder responder) {
      ++begun;
      responder.reply(std::move(request.arguments));
    });
    std::vector<Future> futures;
    for (int i = 0; i < kCalls; ++i) futures.push_back(a_->call(name, "count", text(std::to_string(i)), {}));
    while (begun < kCalls) std::this_thread::yield();
    EXPECT_TRUE(leaving->shutdown(Deadline::after(kPatience)));
    for (int i = 0; i < kCalls; ++i) EXPECT_EQ(text(result_of(futures[i])), std::to_string(i));
  }
}

TEST_P(RpcEndpoint, WaitsForItsCalls) {
  std::promise<void> go;
  add(b_, "wait", [ended = go.get_future().share()](Request, Responder responder) {
    ended.wait();
    responder.reply({});
  });
  EXPECT_TRUE(a_->wait_for_calls(Deadline::after(kPatience)));
  const Future call = a_->call("b", "wait", {}, {});
  const auto early = a_->wait_for_calls(Deadline::after(20ms));
  ASSERT_FALSE(early);
  EXPECT_EQ(early.error().code, ErrorCode::kTimeout);
  go.set_value();
  EXPECT_TRUE(a_->wait_for_calls(Deadline::after(kPatience)));
  EXPECT_TRUE(call.done());
}

TEST_P(RpcEndpoint, ListsTheWorkersAndMeetsThem) {
  const auto workers = a_->workers(Deadline::after(kPatience));
  ASSERT_TRUE(workers) << workers.error().to_string();
  ASSERT_EQ(workers->size(), 2);
  EXPECT_EQ((*workers)[1].to_string(), "worker \"b\" (id 1)");
  std::thread other([&] { EXPECT_TRUE(b_->barrier("here", 2, Deadline::after(kPatience))); });
  EXPECT_TRUE(a_->barrier("here", 2, Deadline::after(kPatience)));
  other.join();
}

TEST_P(RpcEndpoint, IsSetUpBeforeOthersFindIt) {
  const Future early = a_->call("c", "echo", text("x"), {});
  auto options = options_for("c", GetParam());
  options.setup = [&](Agent& c) -> Result<> {
    EXPECT_FALSE(early.wait_until(Deadline::after(50ms)));
    return c.add_function("echo", echo, {});
  };
  const auto c = test::start(store_, options);
  EXPECT_EQ(text(result_of(early)), "x");
  EXPECT_TRUE(c->shutdown(Deadline::after(kPatience)));
}

TEST_P(RpcEndpoint, DoesNotJoinIfItsSetupFails) {
  auto options = options_for("c", GetParam());
  options.setup = [](Agent&) -> Result<> { return fail(ErrorCode::kInvalidArgument, "no model"); };
  const auto failed = start_endpoint(store_, options);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().message, "no model");
  EXPECT_EQ(a_->workers(Deadline::after(kPatience))->size(), 2U);
}

TEST_P(RpcEndpoint, AThreadThatWaitsReturnsWhenTheWorkerLeaves) {
  std::thread waiting([&] { a_->wait_until([] { return false; }, Deadline::never()); });
  EXPECT_TRUE(a_->shutdown(Deadline::after(kPatience)));
  waiting.join();
  a_->wait_until([] { return false; }, Deadline::never());  // returns at once, too
}

INSTANTIATE_TEST_SUITE_P(Transports, RpcEndpoint, testing::Values("shm,tcp", "unix", "tcp", "striped"),
                         [](const auto& info) {
                           const std::string name = info.param;
                           return name.substr(0, name.find(','));
                         });

}  // namespace
}  // namespace muster::rpc::test
