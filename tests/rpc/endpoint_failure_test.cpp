// What goes wrong between endpoints of one process.
#include <atomic>
#include <future>
#include <latch>
#include <thread>

#include "rpc/workers.h"

namespace muster::rpc::test {
namespace {

class RpcFailure : public testing::Test {
 protected:
  /// The last owner of the result shuts the endpoint down. So what its functions use must be declared before it.
  std::shared_ptr<Agent> start(EndpointOptions options) {
    const auto agent = test::start(store_, options);
    return {agent.get(), [agent](Agent*) { (void)agent->shutdown(Deadline::after(kPatience)); }};
  }
  std::shared_ptr<Agent> start(const std::string& name) { return start(options_for(name, "shm,tcp")); }

  /// Waits until the endpoint that used the store is gone.
  static bool is_released(const std::weak_ptr<Store>& used) {
    const Deadline deadline = Deadline::after(10s);
    while (used.use_count() > 1 && !deadline.passed()) std::this_thread::yield();
    return used.use_count() <= 1;
  }

  const std::shared_ptr<Store> store_ = memory_store();
};

TEST_F(RpcFailure, ACallEndsAtItsTimeout) {
  std::latch gate(1);
  const auto a = start("a"), b = start("b");
  ASSERT_TRUE(b->add_function("sleeps",
                              [&](Request, Responder responder) {
                                gate.wait();
                                responder.reply({});
                              },
                              {}));
  ASSERT_TRUE(b->add_function("echo", echo, {}));
  const CallError error = error_of(a->call("b", "sleeps", {}, {.timeout = 50ms}));
  EXPECT_EQ(error.error.code, ErrorCode::kTimeout);
  EXPECT_NE(error.error.message.find("has not returned a result within 0.05 s"), std::string::npos)
      << error.to_string();
  EXPECT_NE(error.to_string().find("call of \"sleeps\" at worker \"b\""), std::string::npos) << error.to_string();
  EXPECT_EQ(text(result_of(a->call("b", "echo", text("x"), {}))), "x") << "other calls go on";
  gate.count_down();
  EXPECT_EQ(text(result_of(a->call("b", "echo", text("late answers are ignored"), {}))), "late answers are ignored");
}

TEST_F(RpcFailure, CancelTellsTheFunction) {
  std::latch started(1), canceled(1);
  const auto a = start("a"), b = start("b");
  ASSERT_TRUE(b->add_function("works",
                              [&](Request request, Responder responder) {
                                started.count_down();
                                while (!request.canceled()) std::this_thread::yield();
                                canceled.count_down();
                                responder.reply({});
                              },
                              {}));
  const Future future = a->call("b", "works", {}, {});
  started.wait();
  future.cancel();
  EXPECT_EQ(error_of(future).error.code, ErrorCode::kAborted);
  canceled.wait();
}

TEST_F(RpcFailure, ARequestThatIsLateDoesNotRun) {
  auto options = options_for("b", "shm,tcp");
  options.max_handlers = 1;
  std::latch gate(1);
  std::atomic<int> runs = 0;
  const auto a = start("a"), b = start(options);
  ASSERT_TRUE(b->add_function("sleeps",
                              [&](Request, Responder responder) {
                                gate.wait();
                                responder.reply({});
                              },
                              {}));
  ASSERT_TRUE(b->add_function("count",
                              [&](Request, Responder responder) {
                                ++runs;
                                responder.reply({});
                              },
                              {}));
  const Future sleeping = a->call("b", "sleeps", {}, {});
  EXPECT_EQ(error_of(a->call("b", "count", {}, {.timeout = 20ms})).error.code, ErrorCode::kTimeout);
  // tidy: allow(sleep) b counts the 20 ms from the arrival of the request
  std::this_thread::sleep_for(500ms);
  gate.count_down();
  (void)result_of(sleeping);
  EXPECT_TRUE(b->shutdown(Deadline::after(kPatience)));
  EXPECT_EQ(runs, 0);
}

TEST_F(RpcFailure, ANameBelongsToOneWorker) {
  const auto a = start("a");
  const auto second = start_endpoint(store_, options_for("a", "shm,tcp"));
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kAlreadyExists);
  EXPECT_NE(second.error().message.find("worker \"a\" (id 0"), std::string::npos) << second.error().message;
  ASSERT_TRUE(a->shutdown(Deadline::after(kPatience)));
  EXPECT_EQ(start("a")->self().id, 2) << "ids are never used twice";
}

TEST_F(RpcFailure, CallsWaitForAWorkerThatJoinsLater) {
  const auto a = start("a");
  const Future future = a->call("late", "echo", text("x"), {});
  EXPECT_FALSE(future.wait_until(Deadline::after(300ms)));
  auto options = options_for("late", "shm,tcp");
  const auto late = start(options);
  ASSERT_TRUE(late->add_function("echo", echo, {}));
  // The call may arrive before the function was added.
  const CallResult& result = future.wait();
  if (!result) {
    EXPECT_EQ(result.error().error.code, ErrorCode::kNotFound);
  }
  const CallError error = error_of(a->call("never", "echo", {}, {.timeout = 50ms}));
  EXPECT_NE(error.error.message.find("no worker named \"never\" has joined within 0.05 s"), std::string::npos);
}

TEST_F(RpcFailure, ManyUnknownNamesDoNotBlockTheHandlers) {
  auto options = options_for("a", "shm,tcp");
  options.max_handlers = 1;
  const auto a = start(options), b = start("b");
  ASSERT_TRUE(a->add_function("echo", echo, {}));
  std::vector<Future> lost;
  for (int i = 0; i < 20; ++i) lost.push_back(a->call("nobody" + std::to_string(i), "f", {}, {.timeout = 1s}));
  EXPECT_EQ(text(result_of(b->call("a", "echo", text("x"), {}))), "x");
  for (const Future& future : lost) EXPECT_EQ(error_of(future).error.code, ErrorCode::kTimeout);
}

TEST_F(RpcFailure, NamesAreLookedUpWhileAllFunctionsBlock) {
  auto options = options_for("a", "shm,tcp");
  options.max_handlers = 1;
  std::latch started(1), gate(1);
  const auto a = start(options), b = start("b"), c = start("c");
  ASSERT_TRUE(a->add_function("waits",
                              [&](Request, Responder responder) {
                                started.count_down();
                                gate.wait();
                                responder.reply({});
                              },
                              {}));
  ASSERT_TRUE(c->add_function("echo", echo, {}));
  const Future waiting = b->call("a", "waits", {}, {});
  started.wait();
  EXPECT_EQ(text(result_of(a->call("c", "echo", text("x"), {.timeout = 10s}))), "x");
  gate.count_down();
  (void)result_of(waiting);
}

TEST_F(RpcFailure, ThousandsOfUnknownNamesDoNotDelayAKnownOne) {
  const auto a = start("a"), b = start("b");
  ASSERT_TRUE(b->add_function("echo", echo, {}));
  std::vector<Future> lost;
  for (int i = 0; i < 6000; ++i) lost.push_back(a->call("nobody" + std::to_string(i), "f", {}, {.timeout = 2s}));
  EXPECT_EQ(text(result_of(a->call("b", "echo", text("x"), {.timeout = 1s}))), "x");
  for (const Future& future : lost) EXPECT_EQ(error_of(future).error.code, ErrorCode::kTimeout);
}

TEST_F(RpcFailure, AFunctionInABarrierLetsOthersRun) {
  auto options = options_for("b", "shm,tcp");
  options.max_handlers = 1;
  std::latch started(1);
  const auto a = start("a"), b = start(options);
  ASSERT_TRUE(b->add_function("meets",
                              [&](Request, Responder responder) {
                                started.count_down();
                                EXPECT_TRUE(b->barrier("here", 2, Deadline::after(kPatience)));
                                responder.reply({});
                              },
                              {}));
  ASSERT_TRUE(b->add_function("echo", echo, {}));
  const Future meeting = a->call("b", "meets", {}, {});
  started.wait();
  EXPECT_EQ(text(result_of(a->call("b", "echo", text("x"), {.timeout = 10s}))), "x");
  EXPECT_TRUE(a->barrier("here", 2, Deadline::after(kPatience)));
  (void)result_of(meeting);
}

TEST_F(RpcFailure, ARecordOfAnotherNameIsRefused) {
  const auto a = start("a"), b = start("b");
  const Deadline deadline = Deadline::after(kPatience);
  ASSERT_TRUE(store_->set("rpc/rpc/name/alias", *store_->get("rpc/rpc/name/b", deadline), deadline));
  const CallError error = error_of(a->call("alias", "f", {}, {.timeout = 5s}));
  EXPECT_EQ(error.error.code, ErrorCode::kProtocol) << error.to_string();
}

TEST_F(RpcFailure, CallsToAWorkerThatLeftFailAtOnce) {
  const auto a = start("a"), b = start("b");
  ASSERT_TRUE(b->add_function("echo", echo, {.idempotent = true}));
  (void)result_of(a->call("b", "echo", {}, {}));
  ASSERT_TRUE(b->shutdown(Deadline::after(kPatience)));
  const CallError error = error_of(a->call("b", "echo", {}, {}));
  EXPECT_EQ(error.error.code, ErrorCode::kPeerLost) << error.to_string();
  EXPECT_NE(error.error.message.find("worker \"b\" (id 1"), std::string::npos) << error.to_string();
  EXPECT_NE(error.error.message.find("has left"), std::string::npos) << error.to_string();
  const Future waits = a->call("b", "echo", text("x"), {.idempotent = true});
  EXPECT_FALSE(waits.wait_until(Deadline::after(100ms)));
  const auto again = start("b");
  ASSERT_TRUE(again->add_function("echo", echo, {.idempotent = true}));
  (void)waits.wait();  // it may have arrived before the function was added
  EXPECT_EQ(text(result_of(a->call("b", "echo", text("y"), {}))), "y");
}

TEST_F(RpcFailure, WithFixedMembersACallToAWorkerThatLeftBeforeFailsAtOnce) {
  auto options = options_for("a", "shm,tcp");
  options.fixed_members = true;
  const auto a = start(options), b = start("b");
  ASSERT_TRUE(b->shutdown(Deadline::after(kPatience)));  // a has never called it
  const CallError error = error_of(a->call("b", "echo", {}, {}));
  EXPECT_EQ(error.error.code, ErrorCode::kPeerLost) << error.to_string();
  EXPECT_NE(error.error.message.find("no worker has the name \"b\""), std::string::npos) << error.to_string();
}

TEST_F(RpcFailure, TheQueueOfAnUnknownWorkerHasACap) {
  auto options = options_for("a", "shm,tcp");
  options.max_queued_calls = 10;
  std::vector<Future> futures;
  const auto a = start(options);
  for (int i = 0; i < 11; ++i) futures.push_back(a->call("nobody", "f", {}, {}));
  EXPECT_EQ(error_of(futures.back()).error.code, ErrorCode::kResourceExhausted);
  for (const Future& future : futures) future.cancel();
  EXPECT_EQ(error_of(a->call("nobody", "f", {}, {.timeout = 10ms})).error.code, ErrorCode::kTimeout);
}

TEST_F(RpcFailure, CallsToItselfHaveDeadlinesAndACap) {
  auto options = options_for("a", "shm,tcp");
  options.max_handlers = 1;
  options.max_queued_calls = 10;
  options.max_message_bytes = 1 << 20;
  std::latch gate(1);
  std::atomic<int> runs = 0;
  const auto a = start(options);
  ASSERT_TRUE(a->add_function("waits",
                              [&](Request request, Responder responder) {
                                gate.wait();
                                EXPECT_FALSE(request.canceled());
                                responder.reply({});
                              },
                              {}));
  ASSERT_TRUE(a->add_function("count", [&](Request, Responder) { ++runs; }, {}));
  ASSERT_TRUE(a->add_function("large",
                              [](Request, Responder responder) {
                                responder.reply(Message{{}, {Buffer::allocate((1 << 20) + 1)}});
                              },
                              {}));
  const Future waiting = a->call("a", "waits", {}, {});
  EXPECT_EQ(error_of(a->call("a", "count", {}, {.timeout = 10ms})).error.code, ErrorCode::kTimeout);
  for (int i = 2; i < 10; ++i) a->call("a", "count", {}, {}).cancel();
  EXPECT_EQ(error_of(a->call("a", "count", {}, {})).error.code, ErrorCode::kResourceExhausted);
  gate.count_down();
  (void)result_of(waiting);
  CallError error;
  do {  // until the canceled calls have left the queue
    error = error_of(a->call("a", "large", {}, {}));
  } while (error.error.code == ErrorCode::kResourceExhausted &&
           error.error.message.find("wait already") != std::string::npos);
  EXPECT_NE(error.error.message.find("over the cap of 1 MiB"), std::string::npos) << error.to_string();
  EXPECT_TRUE(a->shutdown(Deadline::after(kPatience)));
  EXPECT_EQ(runs, 0);
}

TEST_F(RpcFailure, ACallThatHasEndedReleasesItsArguments) {
  const auto a = start("a"), b = start("b");
  ASSERT_TRUE(b->add_function("echo", echo, {.idempotent = true}));
  const auto memory = std::make_shared<int>();
  const std::weak_ptr<int> alive = memory;
  const Message message{{}, {Buffer(memory, memory.get(), sizeof(int))}};
  const Future done = a->call("b", "echo", message, {.idempotent = true});
  (void)result_of(done);
  const Future timed_out = a->call("nobody", "echo", message, {.timeout = 10ms});
  (void)error_of(timed_out);
  EXPECT_EQ(alive.use_count(), 2) << "of this test alone";
}

TEST_F(RpcFailure, TheQueueOfAWorkerHasACap) {
  auto options = options_for("a", "shm,tcp");
  options.max_queued_calls = 10;
  std::latch gate(1);
  const auto a = start(options), b = start("b");
  ASSERT_TRUE(b->add_function("sleeps",
                              [&](Request, Responder responder) {
                                gate.wait();
                                responder.reply({});
                              },
                              {}));
  (void)error_of(a->call("b", "none", {}, {}));  // connects
  const int started = options.max_handlers;      // at most: these may need no room
  std::vector<Future> futures;
  for (int i = 0; i < kMaxCallsInFlight + started + 11; ++i) futures.push_back(a->call("b", "sleeps", {}, {}));
  const CallError error = error_of(futures.back());
  EXPECT_EQ(error.error.code, ErrorCode::kResourceExhausted);
  EXPECT_NE(error.error.message.find("10 calls to worker \"b\""), std::string::npos) << error.error.message;
  gate.count_down();
  int failed = 0;
  for (const Future& future : futures) failed += future.wait() ? 0 : 1;
  EXPECT_LE(failed, started + 1);
}

TEST_F(RpcFailure, MessagesHaveACap) {
  auto options = options_for("a", "shm,tcp");
  options.max_message_bytes = 1 << 20;
  const auto a = start(options);
  options.name = "b";
  const auto b = start(options);
  ASSERT_TRUE(b->add_function("large",
                              [](Request, Responder responder) {
                                responder.reply(Message{{}, {Buffer::allocate((1 << 20) + 1)}});
                              },
                              {}));
  const CallError sent = error_of(a->call("b", "large", Message{Bytes((1 << 20) + 1), {}}, {}));
  EXPECT_EQ(sent.error.code, ErrorCode::kInvalidArgument);
  EXPECT_NE(sent.error.message.find("over the cap of 1 MiB"), std::string::npos) << sent.error.message;
  const CallError returned = error_of(a->call("b", "large", {}, {}));
  EXPECT_NE(returned.error.message.find("over the cap of 1 MiB"), std::string::npos) << returned.error.message;
}

TEST_F(RpcFailure, ShutdownFailsTheCallsOfPeersOnly) {
  std::latch started(1), gate(1);
  const auto a = start("a"), b = start("b"), c = start("c");
  ASSERT_TRUE(b->add_function("sleeps",
                              [&](Request request, Responder responder) {
                                started.count_down();
                                gate.wait();
                                EXPECT_TRUE(request.canceled());
                                responder.reply({});
                              },
                              {}));
  ASSERT_TRUE(c->add_function("echo", echo, {}));
  const Future future = a->call("b", "sleeps", {}, {});
  started.wait();
  std::thread stop([&] { EXPECT_EQ(b->shutdown(Deadline::after(10ms)).error().code, ErrorCode::kTimeout); });
  const CallError error = error_of(future);
  gate.count_down();
  stop.join();
  EXPECT_EQ(error.error.code, ErrorCode::kPeerLost);
  EXPECT_NE(error.error.message.find("has left"), std::string::npos) << error.error.message;
  EXPECT_EQ(text(result_of(a->call("c", "echo", text("x"), {}))), "x");
  EXPECT_EQ(error_of(b->call("a", "f", {}, {})).error.code, ErrorCode::kAborted);
  EXPECT_TRUE(b->shutdown(Deadline::after(kPatience))) << "waits for the function";
}

/// The agent lives until the function returns.
TEST_F(RpcFailure, ShutdownNamesAFunctionThatDoesNotReturn) {
  const auto a = start("a");
  const auto used = std::shared_ptr<Store>(store_.get(), [](Store*) {});
  const std::weak_ptr<Store> alive = used;
  const auto gate = std::make_shared<std::latch>(1);
  {
    const auto b = test::start(std::shared_ptr<Store>(used), options_for("b", "shm,tcp"));
    std::latch started(1);
    ASSERT_TRUE(b->add_function("stuck",
                                [&started, gate](Request, Responder responder) {
                                  responder.reply({});
                                  started.count_down();
                                  gate->wait();
                                },
                                {}));
    (void)result_of(a->call("b", "stuck", {}, {}));
    started.wait();
    const auto left = b->shutdown(Deadline::after(50ms));
    ASSERT_FALSE(left);
    EXPECT_EQ(left.error().code, ErrorCode::kTimeout);
    EXPECT_NE(left.error().message.find("has not returned from: \"stuck\""), std::string::npos) << left.error().message;
  }
  EXPECT_GT(alive.use_count(), 1);
  gate->count_down();
  EXPECT_TRUE(is_released(alive));
}

TEST_F(RpcFailure, AFunctionMayDropTheLastReference) {
  const auto a = start("a");
  const auto used = std::shared_ptr<Store>(store_.get(), [](Store*) {});
  auto b = test::start(std::shared_ptr<Store>(used), options_for("b", "shm,tcp"));
  ASSERT_TRUE(b->add_function("drops",
                              [&b](Request, Responder responder) {
                                b.reset();
                                responder.reply({});
                              },
                              {}));
  (void)a->call("b", "drops", {}, {}).wait();
  EXPECT_TRUE(is_released(used));
}

TEST_F(RpcFailure, ACallbackMayDropTheLastReference) {
  std::latch gate(1), over(1);
  const auto b = start("b");
  const auto used = std::shared_ptr<Store>(store_.get(), [](Store*) {});
  auto a = test::start(std::shared_ptr<Store>(used), options_for("a", "shm,tcp"));
  ASSERT_TRUE(b->add_function("waits",
                              [&](Request, Responder responder) {
                                gate.wait();
                                responder.reply({});
                              },
                              {}));
  a->call("b", "waits", {}, {}).then([&](const CallResult&) {
    a.reset();
    over.count_down();
  });
  gate.count_down();
  over.wait();
  EXPECT_TRUE(is_released(used));
}

TEST_F(RpcFailure, ACallbackMustNotShutItsWorkerDown) {
  std::latch gate(1);
  const auto a = start("a"), b = start("b");
  ASSERT_TRUE(b->add_function("waits",
                              [&](Request, Responder responder) {
                                gate.wait();
                                responder.reply({});
                              },
                              {}));
  std::promise<Result<>> left;
  const Future future = a->call("b", "waits", {}, {});
  future.then([&](const CallResult&) { left.set_value(a->shutdown(Deadline::after(kPatience))); });
  gate.count_down();
  (void)result_of(future);
  EXPECT_EQ(left.get_future().get().error().code, ErrorCode::kInvalidArgument);
}

TEST_F(RpcFailure, AFunctionMustNotShutItsWorkerDown) {
  const auto a = start("a"), b = start("b");
  ASSERT_TRUE(b->add_function("stop",
                              [&](Request, Responder responder) {
                                responder.reply(text(b->shutdown(Deadline::after(kPatience)).error().message));
                              },
                              {}));
  EXPECT_EQ(text(result_of(a->call("b", "stop", {}, {}))),
            "a function or a callback must not shut its own worker down");
}

TEST_F(RpcFailure, SeveralThreadsMayShutDown) {
  const auto gate = std::make_shared<std::latch>(1);
  std::latch started(1);
  const auto a = start("a"), b = start("b");
  ASSERT_TRUE(b->add_function("sleeps",
                              [&started, gate](Request, Responder responder) {
                                started.count_down();
                                gate->wait();
                                responder.reply({});
                              },
                              {}));
  const Future future = a->call("b", "sleeps", {}, {});
  started.wait();
  std::latch together(3);
  std::vector<std::thread> threads;
  for (int i = 1; i <= 3; ++i) {
    threads.emplace_back([&, i] {
      together.arrive_and_wait();
      (void)b->shutdown(Deadline::after(i * 50ms));
    });
  }
  (void)error_of(future);
  gate->count_down();
  for (std::thread& thread : threads) thread.join();
}

TEST_F(RpcFailure, InvalidOptionsAreRefused) {
  const auto refused = [this](const std::function<void(EndpointOptions&)>& change) {
    auto options = options_for("x", "shm,tcp");
    change(options);
    const auto agent = start_endpoint(store_, options);
    return !agent && agent.error().code == ErrorCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](EndpointOptions& options) { options.name = ""; }));
  EXPECT_TRUE(refused([](EndpointOptions& options) { options.max_handlers = 0; }));
  EXPECT_TRUE(refused([](EndpointOptions& options) { options.tcp_streams = 17; }));
  EXPECT_TRUE(refused([](EndpointOptions& options) { options.transports = "udp"; }));
  EXPECT_TRUE(refused([](EndpointOptions& options) { options.heartbeat_timeout = 1ms; }));
}

TEST_F(RpcFailure, AFutureMayOutliveItsAgent) {
  auto a = test::start(store_, options_for("a", "shm,tcp"));
  ASSERT_TRUE(a->add_function("echo", echo, {}));
  const Future future = a->call("a", "echo", text("x"), {});
  EXPECT_EQ(text(result_of(future)), "x");
  ASSERT_TRUE(a->shutdown(Deadline::after(kPatience)));
  a.reset();
  EXPECT_EQ(text(result_of(future)), "x");
}

TEST_F(RpcFailure, WorkersOfOtherSecretsAreRefused) {
  auto options = options_for("a", "tcp");
  options.credentials.secret = to_bytes("a secret of the tests");
  const auto a = start(options);
  options.name = "b";
  options.credentials.secret = to_bytes("another secret of the tests");
  const auto b = start(options);
  const CallError error = error_of(b->call("a", "f", {}, {.timeout = 5s}));
  EXPECT_EQ(error.error.code, ErrorCode::kAuthentication) << error.to_string();
}

}  // namespace
}  // namespace muster::rpc::test
