// References between two real endpoints, whose connections break.
#include "muster/rpc/ref_service.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "rpc/workers.h"

namespace muster::rpc::test {
namespace {

constexpr int kMaxFd = 256;

/// Breaks all TCP connections of this process, as a network would that fails.
int break_connections() {
  int broken = 0;
  for (int fd = 3; fd < kMaxFd; ++fd) {
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0 || peer.ss_family != AF_INET) continue;
    if (::shutdown(fd, SHUT_RDWR) == 0) ++broken;
  }
  return broken;
}

TEST(RefService, AReleaseIsSentAgainWhenItsConnectionBreaks) {
  constexpr int kRounds = 20, kRefs = 50;
  const std::shared_ptr<Store> store = memory_store();
  const auto a = start(store, options_for("a", "tcp")), b = start(store, options_for("b", "tcp"));
  // The lease is longer than the test, so only releases can end references.
  const RefService::Options options{.lease = 10 * kPatience};
  const auto holder = RefService::start(a, options), owner = RefService::start(b, options);
  ASSERT_TRUE(holder && owner);
  ASSERT_TRUE(b->add_function("echo", echo, {.idempotent = true}));
  int broken = 0;
  for (int round = 0; round < kRounds; ++round) {
    (void)result_of(a->call("b", "echo", text("x"), {.idempotent = true}));  // there is a connection
    std::vector<RefPtr> refs;
    for (int i = 0; i < kRefs; ++i) {
      refs.push_back((*holder)->create("b"));
      (*owner)->accept(refs.back()->id(), a->self());
      (*owner)->set_value(refs.back()->id(), std::make_shared<RefValue>());
    }
    EXPECT_EQ((*owner)->counts().first, kRefs);
    refs.clear();
    broken += break_connections();
    const Deadline deadline = Deadline::after(kPatience);
    while ((*owner)->counts().first > 0 && !deadline.passed()) std::this_thread::yield();
    ASSERT_EQ((*owner)->counts().first, 0) << "in round " << round;
  }
  EXPECT_GT(broken, 0);
  for (const auto& service : {*holder, *owner}) service->stop();
  for (const auto& agent : {a, b}) EXPECT_TRUE(agent->shutdown(Deadline::after(kPatience)));
}

TEST(RefService, AReleaseDoesNotWaitForAnOwnerThatHasLeft) {
  const std::shared_ptr<Store> store = memory_store();
  const auto a = start(store, options_for("a", "tcp")), b = start(store, options_for("b", "tcp"));
  const auto holder = RefService::start(a, {.lease = 10 * kPatience});
  ASSERT_TRUE(holder);
  RefPtr ref = (*holder)->create("b");
  ASSERT_TRUE(b->shutdown(Deadline::after(kPatience)));  // a has never called it
  ref.reset();
  (*holder)->stop();
  const auto ended = a->shutdown(Deadline::after(kPatience));
  EXPECT_TRUE(ended) << (ended ? "" : ended.error().to_string());
}

TEST(RefService, AWaitThatIsGivenUpIsDropped) {
  const auto agent = start(memory_store(), options_for("a", "tcp"));
  const auto service = RefService::start(agent, {.lease = 40ms});
  ASSERT_TRUE(service);
  const RefPtr ref = (*service)->create("a");  // it never gets a value
  auto dropped = std::make_shared<bool>(false);
  const std::weak_ptr<bool> watched = dropped;
  std::atomic<bool> given_up = false;
  ASSERT_TRUE((*service)->when_ready(
      ref->id(), [dropped = std::move(dropped)](const auto&) { *dropped = true; }, [&] { return given_up.load(); }));
  EXPECT_FALSE(watched.expired());
  given_up = true;
  const Deadline deadline = Deadline::after(kPatience);
  while (!watched.expired() && !deadline.passed()) std::this_thread::yield();
  EXPECT_TRUE(watched.expired());
  (*service)->stop();
  EXPECT_TRUE(agent->shutdown(Deadline::after(kPatience)));
}

TEST(RefService, ShutdownNamesAPendingCall) {
  const auto a = start(memory_store(), options_for("a", "tcp"));
  const Future pending = a->call("b", "echo", {}, {});
  const auto ended = a->shutdown(Deadline::after(100ms));
  ASSERT_FALSE(ended);
  EXPECT_NE(ended.error().message.find("still had pending: call of \"echo\" at worker \"b\""), std::string::npos)
      << ended.error().to_string();
}

}  // namespace
}  // namespace muster::rpc::test
