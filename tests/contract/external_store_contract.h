#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include "contract/ttl_lock_contract.h"
#include "store/external_server.h"

namespace muster {

/// An external store server that is started for one test.
struct ExternalServer {
  std::unique_ptr<ServerProcess> process;  ///< null if the server is not installed
  std::string url;
  std::string host;  ///< its name in error messages
  bool persists = false;
};
using StartExternalServer = std::function<ExternalServer()>;

/// The behavior of a store when its external server, or a process that uses the server, is killed or stopped.
class ExternalStoreContract : public testing::TestWithParam<StartExternalServer> {
 protected:
  void SetUp() override {
    server_ = GetParam()();
    if (server_.process == nullptr) GTEST_SKIP() << "what this store needs is not installed";
    store_ = open_when_up(server_.url);
    ASSERT_NE(store_, nullptr);
  }
  static Deadline soon() { return Deadline::after(60s); }

  ExternalServer server_;
  std::unique_ptr<Store> store_;
};

TEST_P(ExternalStoreContract, ReportsADeadServerAndReconnects) {
  std::atomic<int> waiting = 0;
  std::vector<std::thread> threads;
  const auto lost = [&](const auto& wait) {
    threads.emplace_back([&, wait] {
      const auto mine = open_when_up(server_.url);
      EXPECT_OK(mine->set("here", {}, soon()));
      ++waiting;
      expect_error(wait(*mine), ErrorCode::kPeerLost, server_.host);
    });
  };
  lost([](Store& s) { return s.get("never set", soon()); });
  lost([](Store& s) { return s.wait({"nor this"}, soon()); });
  lost([](Store& s) { return s.queue_pop("an empty queue", soon()); });
  lost([](Store& s) { return s.barrier("a barrier with one arrival", 2, soon()); });
  while (waiting < 4) std::this_thread::yield();
  server_.process->kill();
  for (auto& thread : threads) thread.join();
  expect_error(store_->set("k", {}, soon()), ErrorCode::kPeerLost, server_.host);
  server_.process->restart();
  open_when_up(server_.url);
  EXPECT_EQ(store_->check({"here"}, soon()), server_.persists);
  EXPECT_OK(store_->set("k", as_bytes("again"), soon()));
  EXPECT_EQ(store_->get("k", soon()), to_bytes("again"));
}

TEST_P(ExternalStoreContract, ReturnsAtTheDeadlineIfTheServerHangs) {
  server_.process->stop();
  expect_error(store_->set("k", {}, Deadline::after(20ms)), ErrorCode::kTimeout, "set(\"k\")");
  expect_error(open_store(server_.url, {}, Deadline::after(20ms)), ErrorCode::kTimeout, server_.host);
}

TEST_P(ExternalStoreContract, ReleasesTheLocksOfADeadProcess) {
  const pid_t pid = fork();
  if (pid == 0) {
    const auto mine = open_when_up(server_.url);
    const auto claim = mine->claim("root", as_bytes("child"), 2s, soon());
    (void)mine->set("claimed", {}, soon());
    pause();
  }
  EXPECT_OK(store_->wait({"claimed"}, soon()));
  EXPECT_EQ(store_->claims("", soon())->at("root"), to_bytes("child"));
  // Waits for longer than the lock would last without a live holder.
  expect_error(store_->wait({"never set"}, Deadline::after(2200ms)), ErrorCode::kTimeout);
  expect_error(store_->claim("root", {}, 60s, soon()), ErrorCode::kAlreadyExists);
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  auto mine = store_->claim("root", {}, 60s, soon());
  const Deadline deadline = soon();
  while (!mine && !deadline.passed()) {
    expect_error(mine, ErrorCode::kAlreadyExists, "root");
    mine = store_->claim("root", {}, 60s, soon());
  }
  EXPECT_TRUE(mine.has_value());
}

}  // namespace muster
