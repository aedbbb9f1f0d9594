#include "muster/io/connection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "io/io_testing.h"
#include "muster/io/connect/handshake.h"

namespace muster {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::StartsWith;

Acceptor::Options accept_with(std::string_view secret) {
  return {.credentials = {to_bytes(secret), nullptr}, .hello = to_bytes("server")};
}
DialOptions dial_with(std::string_view secret, bool retry = false) {
  return {.credentials = {to_bytes(secret), nullptr}, .hello = to_bytes("client"), .retry = retry};
}

/// An address without a listener: a port that was free a moment ago.
Address address_without_listener() {
  const auto listener = listen_on(loopback());
  return *local_address(listener->get());
}

void expect_conversation(const Address& address) {
  const auto loop = make_loop();
  Server server(*loop, address, accept_with("secret"));
  auto client = dial_now(*loop, server.address(), dial_with("secret"));
  ASSERT_TRUE(client) << client.error().message;
  EXPECT_EQ(to_string(client->hello), "server");
  ASSERT_TRUE(drive_until(*loop, [&] { return !server.accepted.empty(); }));
  EXPECT_EQ(to_string(server.accepted[0].hello), "client");
  const std::string text(1 << 20, 'm');
  EXPECT_EQ(carry(*client, server.accepted[0], text), text);
  EXPECT_EQ(carry(server.accepted[0], *client, text), text);
}

TEST(Connection, IsMadeOverIpv4) { expect_conversation(loopback()); }

TEST(Connection, IsMadeOverIpv6) {
  if (!has_ipv6()) GTEST_SKIP() << "this host has no IPv6 loopback";
  expect_conversation(*Address::parse("[::1]:0"));
}

TEST(Connection, IsMadeOverAnAbstractUnixSocket) { expect_conversation(unix_here("conversation")); }

TEST(Connection, IsMadeOverAUnixSocketInTheFileSystem) {
  char folder[] = "/tmp/muster-test-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string path = std::string(folder) + "/socket";
  expect_conversation(*Address::parse("unix:" + path));
  struct stat status;
  EXPECT_NE(stat(path.c_str(), &status), 0) << "the acceptor left its socket file behind";
  EXPECT_EQ(rmdir(folder), 0);
}

TEST(Connection, KeepsBytesAfterTheHandshake) {
  const auto loop = make_loop();
  Server server(*loop, loopback(), accept_with("secret"));
  const Fd raw = connect_raw(*loop, server.address());
  Handshake client(Handshake::Side::kClient, as_bytes("secret"), as_bytes("eager"));
  const Bytes greeting = client.take_output();
  ASSERT_EQ(send(raw.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL), static_cast<ssize_t>(greeting.size()));
  Bytes answer(greeting.size());
  ASSERT_TRUE(drive_until(*loop, [&] {
    return recv(raw.get(), answer.data(), answer.size(), MSG_PEEK) == static_cast<ssize_t>(answer.size());
  }));
  ASSERT_TRUE(client.feed(answer));
  Bytes proof = client.take_output();
  proof.insert(proof.end(), {'e', 'a', 'r', 'l', 'y'});
  ASSERT_EQ(send(raw.get(), proof.data(), proof.size(), MSG_NOSIGNAL), static_cast<ssize_t>(proof.size()));
  ASSERT_TRUE(drive_until(*loop, [&] { return !server.accepted.empty(); }));
  EXPECT_EQ(to_string(server.accepted[0].hello), "eager");
  EXPECT_EQ(to_string(server.accepted[0].leftover), "early");
}

TEST(Connection, FailsAtBothEndsWhenTheSecretsDiffer) {
  const auto loop = make_loop();
  for (const auto& address : {loopback(), unix_here("secrets")}) {
    Server server(*loop, address, accept_with("one"));
    testing::internal::CaptureStderr();
    for (const std::string_view wrong : {"two", ""}) {
      const auto client = dial_now(*loop, server.address(), dial_with(wrong, /*retry=*/true));
      ASSERT_FALSE(client);
      EXPECT_EQ(client.error().code, ErrorCode::kAuthentication) << client.error().message;
      EXPECT_THAT(client.error().message, HasSubstr(server.address().to_string()));
    }
    EXPECT_TRUE(server.accepted.empty());
    const std::string peer = address.is_unix() ? "process " + std::to_string(getpid()) : "127.0.0.1:[0-9]+";
    EXPECT_THAT(testing::internal::GetCapturedStderr(),
                ContainsRegex(" refused " + peer + ": the peer does not know this job's secret"));
  }
}

TEST(Dial, FailsAtOnceWithoutAListenerAndRetry) {
  const auto loop = make_loop();
  const Address address = address_without_listener();
  const auto result = dial_now(*loop, address, dial_with(""));
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kUnavailable);
  EXPECT_EQ(result.error().message, "cannot connect to " + address.to_string() + ": Connection refused");
  EXPECT_EQ(result.error().system_error, ECONNREFUSED);
}

TEST(Dial, NamesTheAddressAndTheLastReasonAtTheDeadline) {
  const auto loop = make_loop();
  const Address address = address_without_listener();
  const auto result = dial_now(*loop, address, dial_with("", true), Deadline::after(100ms));
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kTimeout);
  EXPECT_THAT(result.error().message, StartsWith("nothing answered at " + address.to_string() + " within 0."));
  EXPECT_THAT(result.error().message, testing::EndsWith(" s: Connection refused"));
}

TEST(Dial, WaitsForAServerThatStartsLater) {
  const auto loop = make_loop();
  for (const auto& address : {address_without_listener(), unix_here("later")}) {
    const auto dialed = start_dial(*loop, address, dial_with("s", true));
    bool tried = false;
    loop->after(30ms, [&] { tried = true; });
    ASSERT_TRUE(drive_until(*loop, [&] { return tried; }));
    EXPECT_FALSE(dialed->result);
    Server server(*loop, address, accept_with("s"));
    ASSERT_TRUE(drive_until(*loop, [&] { return dialed->result.has_value(); }));
    EXPECT_TRUE(*dialed->result) << dialed->result->error().message;
  }
}

TEST(Dial, CallsNoHandlerOnceDestroyed) {
  const auto loop = make_loop();
  Server server(*loop, loopback(), accept_with(""));
  bool called = false;
  auto attempt = dial(*loop, server.address(), dial_with(""), Deadline::after(50ms), [&](auto) { called = true; });
  loop->poll();
  attempt.reset();
  bool over = false;
  loop->after(100ms, [&] { over = true; });
  ASSERT_TRUE(drive_until(*loop, [&] { return over; }));
  EXPECT_FALSE(called);
}

TEST(Dial, MayBeDestroyedByItsOwnHandler) {
  const auto loop = make_loop();
  Server server(*loop, loopback(), accept_with(""));
  for (const auto& address : {server.address(), address_without_listener()}) {
    bool called = false;
    std::unique_ptr<Dial> attempt;
    attempt = dial(*loop, address, dial_with(""), soon(), [&](auto) {
      attempt.reset();
      called = true;
    });
    ASSERT_TRUE(drive_until(*loop, [&] { return called; }));
  }
}

TEST(Dial, TimesOutOnASilentServer) {
  const auto loop = make_loop();
  const auto listener = listen_on(loopback());
  const auto result = dial_now(*loop, *local_address(listener->get()), dial_with("", true), Deadline::after(1s));
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kTimeout);
  EXPECT_THAT(result.error().message, HasSubstr("did not finish the handshake"));
}

TEST(Dial, NamesTheProtocolOfAWrongServer) {
  const auto loop = make_loop();
  const auto listener = listen_on(loopback());
  const auto dialed = start_dial(*loop, *local_address(listener->get()), dial_with("", true));
  std::optional<Fd> accepted;
  ASSERT_TRUE(drive_until(*loop, [&] {
    accepted = *accept_from(listener->get());
    return accepted.has_value();
  }));
  const std::string_view answer = "SSH-2.0-server\r\n";
  ASSERT_EQ(send(accepted->get(), answer.data(), answer.size(), MSG_NOSIGNAL), static_cast<ssize_t>(answer.size()));
  ASSERT_TRUE(drive_until(*loop, [&] { return dialed->result.has_value(); }));
  ASSERT_FALSE(*dialed->result);
  EXPECT_EQ(dialed->result->error().code, ErrorCode::kProtocol);
  EXPECT_THAT(dialed->result->error().message, HasSubstr("SSH"));
}

TEST(Dial, ReportsThatTheServerClosed) {
  const auto loop = make_loop();
  auto listener = listen_on(loopback());
  const auto dialed = start_dial(*loop, *local_address(listener->get()), dial_with(""));
  ASSERT_TRUE(drive_until(*loop, [&] { return accept_from(listener->get())->has_value(); }));
  ASSERT_TRUE(drive_until(*loop, [&] { return dialed->result.has_value(); }));
  ASSERT_FALSE(*dialed->result);
  EXPECT_EQ(dialed->result->error().code, ErrorCode::kPeerLost);
}

TEST(Acceptor, LogsAndDropsUnauthenticatedPeers) {
  const auto loop = make_loop();
  Server server(*loop, loopback(), accept_with("secret"));
  const Fd raw = connect_raw(*loop, server.address());
  testing::internal::CaptureStderr();
  ASSERT_EQ(send(raw.get(), "GET / HTTP/1.0\r\n\r\n", 18, MSG_NOSIGNAL), 18);
  EXPECT_THAT(read_until_closed(*loop, raw.get()), StartsWith("MUSTER"));
  const std::string line = testing::internal::GetCapturedStderr();
  EXPECT_THAT(line, HasSubstr(local_address(raw.get())->to_string()));
  EXPECT_THAT(line, HasSubstr("the peer speaks HTTP"));
  EXPECT_TRUE(server.accepted.empty());
}

TEST(Acceptor, RateLimitsItsLog) {
  const auto loop = make_loop();
  Server server(*loop, loopback(), accept_with("secret"));
  testing::internal::CaptureStderr();
  const TimePoint begin = loop->clock().now();
  for (int i = 0; i < 50; ++i) {
    const Fd raw = connect_raw(*loop, server.address());
    ASSERT_EQ(send(raw.get(), "rubbish!", 8, MSG_NOSIGNAL), 8);
    read_until_closed(*loop, raw.get());
  }
  const int64_t seconds = (loop->clock().now() - begin) / 1s;
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_LE(std::count(text.begin(), text.end(), '\n'), seconds + 1);
  EXPECT_GE(std::count(text.begin(), text.end(), '\n'), 1);
}

TEST(Acceptor, DropsSilentAndHalfHandshakes) {
  const auto loop = make_loop();
  auto options = accept_with("secret");
  options.handshake_timeout = 50ms;
  Server server(*loop, loopback(), std::move(options));
  const Fd silent = connect_raw(*loop, server.address());
  EXPECT_EQ(read_until_closed(*loop, silent.get()), to_string(Handshake::refuse(Handshake::Refusal::kBusy)));
  const Fd half = connect_raw(*loop, server.address());
  ASSERT_EQ(send(half.get(), "MUST", 4, MSG_NOSIGNAL), 4);
  EXPECT_EQ(read_until_closed(*loop, half.get()), to_string(Handshake::refuse(Handshake::Refusal::kBusy)));
  EXPECT_TRUE(server.accepted.empty());
}

TEST(Acceptor, DropsASilentPeerBeforeAHalfHandshake) {
  const auto loop = make_loop();
  auto options = accept_with("secret");
  options.handshake_timeout = std::chrono::hours(1);
  options.greeting_timeout = 20ms;
  Server server(*loop, loopback(), std::move(options));
  const Fd half = connect_raw(*loop, server.address());
  ASSERT_EQ(send(half.get(), "MUST", 4, MSG_NOSIGNAL), 4);
  const Fd silent = connect_raw(*loop, server.address());
  read_until_closed(*loop, silent.get());
  pollfd entry{half.get(), POLLIN, 0};
  EXPECT_EQ(poll(&entry, 1, 0), 0) << "the one that had begun was closed, too";
}

/// Options without timeouts: an unauthenticated connection is closed only to make room for another one.
Acceptor::Options without_timeouts(size_t max_pending) {
  auto options = accept_with("s");
  options.handshake_timeout = options.greeting_timeout = std::chrono::hours(1);
  options.max_pending = max_pending;
  return options;
}

/// `count` connections. Each of them has sent `words` and nothing else.
std::vector<Fd> unauthenticated_peers(Loop& loop, const Address& address, size_t count, ByteView words = {}) {
  std::vector<Fd> all;
  while (all.size() < count) {
    all.push_back(connect_raw(loop, address));
    EXPECT_EQ(send(all.back().get(), words.data(), words.size(), MSG_NOSIGNAL), std::ssize(words));
  }
  return all;
}

TEST(Acceptor, AcceptsWhileFullOfSilentConnections) {
  const auto loop = make_loop();
  for (const auto& address : {loopback(), unix_here("silent")}) {
    Server server(*loop, address, without_timeouts(4));
    const auto silent = unauthenticated_peers(*loop, server.address(), 20);
    const auto dialed = start_dial(*loop, server.address(), dial_with("s"));
    ASSERT_TRUE(drive_until(*loop, [&] { return dialed->result.has_value(); }));
    EXPECT_TRUE(*dialed->result) << dialed->result->error().message;
  }
}

TEST(Acceptor, AcceptsWhileFullOfHalfHandshakes) {
  const auto loop = make_loop();
  Server server(*loop, loopback(), without_timeouts(4));
  const Bytes greeting = Handshake(Handshake::Side::kClient, {}, {}).take_output();
  const auto begun = unauthenticated_peers(*loop, server.address(), 8, greeting);
  const auto dialed = start_dial(*loop, server.address(), dial_with("s"));
  ASSERT_TRUE(drive_until(*loop, [&] { return dialed->result.has_value(); }));
  EXPECT_TRUE(*dialed->result) << dialed->result->error().message;
}

TEST(Acceptor, TellsAnEvictedConnectionToRetry) {
  const auto loop = make_loop();
  Server server(*loop, loopback(), without_timeouts(1));
  const auto silent = unauthenticated_peers(*loop, server.address(), 2);
  const std::string words = read_until_closed(*loop, silent[0].get());
  Handshake client(Handshake::Side::kClient, as_bytes("s"), {});
  const auto refusal = client.feed(as_bytes(words));
  ASSERT_FALSE(refusal);
  EXPECT_EQ(refusal.error().code, ErrorCode::kResourceExhausted) << refusal.error().message;
}

TEST(Acceptor, ServesManyClientsAtOnce) {
  const auto loop = make_loop();
  auto options = accept_with("s");
  options.max_pending = 8;
  Server server(*loop, loopback(), std::move(options));
  std::vector<std::unique_ptr<Dialed>> clients;
  for (int i = 0; i < 200; ++i) clients.push_back(start_dial(*loop, server.address(), dial_with("s")));
  ASSERT_TRUE(drive_until(*loop, [&] { return server.accepted.size() == clients.size(); }));
  for (const auto& dialed : clients) {
    ASSERT_TRUE(drive_until(*loop, [&] { return dialed->result.has_value(); }));
    EXPECT_TRUE(*dialed->result);
  }
}

TEST(Acceptor, DoesNotSpinWhenDescriptorsRunOut) {
  const auto loop = make_loop();
  Server server(*loop, loopback(), accept_with("s"));
  const auto raw = start_connect(server.address());
  ASSERT_TRUE(raw);
  testing::internal::CaptureStderr();
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const Fd highest(dup(0));
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(highest.get());
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  int turns = 0;
  bool over = false;
  loop->after(250ms, [&] { over = true; });
  const auto waited = loop->run_until([&] { return ++turns, over; }, soon());
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("no file descriptor left"));
  ASSERT_TRUE(waited);
  EXPECT_LT(turns, 100);
  const auto client = dial_now(*loop, server.address(), dial_with("s"));
  EXPECT_TRUE(client) << client.error().message;
}

TEST(Acceptor, ClosesSilentPeersWhenDescriptorsRunOut) {
  const auto loop = make_loop();
  Server server(*loop, loopback(), without_timeouts(1024));
  std::vector<Fd> raw;  // stay in the backlog, because the loop does not run
  for (int i = 0; i < 10; ++i) raw.push_back(std::move(*start_connect(server.address())));
  const auto dialed = start_dial(*loop, server.address(), dial_with("s"));
  loop->poll();  // after this, the dial has its socket
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const Fd highest(dup(0));
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(highest.get()) + 2;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const bool over = drive_until(*loop, [&] { return dialed->result.has_value(); });
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_TRUE(over);
  EXPECT_TRUE(*dialed->result) << dialed->result->error().message;
}

TEST(Acceptor, MayBeDestroyedByItsHandler) {
  const auto loop = make_loop();
  for (const bool plain : {false, true}) {
    std::unique_ptr<Acceptor> acceptor;
    bool called = false;
    auto options = accept_with("s");
    options.plain = plain;
    acceptor = *Acceptor::create(*loop, loopback(), std::move(options), [&](Connection) {
      acceptor.reset();
      called = true;
    });
    const Address address = acceptor->address();
    const Fd raw = plain ? connect_raw(*loop, address) : Fd();
    const auto dialed = plain ? nullptr : start_dial(*loop, address, dial_with("s"));
    ASSERT_TRUE(drive_until(*loop, [&] { return called; }));
  }
}

TEST(Acceptor, HandsPlainConnectionsOverAtOnce) {
  const auto loop = make_loop();
  Acceptor::Options options;
  options.plain = true;
  Server server(*loop, loopback(), std::move(options));
  std::vector<Fd> raw;
  for (int i = 0; i < 5; ++i) raw.push_back(connect_raw(*loop, server.address()));
  ASSERT_TRUE(drive_until(*loop, [&] { return server.accepted.size() == 5; }));
  EXPECT_EQ(server.accepted[0].peer, *local_address(raw[0].get()));
}

TEST(Acceptor, RefusesAnotherUserOnAUnixSocket) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const auto loop = make_loop();
  Server server(*loop, unix_here("uid"), accept_with("s"));
  const Address address = server.address();
  const pid_t child = fork();
  if (child == 0) {
    if (setgid(65534) != 0 || setuid(65534) != 0) _exit(3);
    const auto own_loop = make_loop();
    const auto result = dial_now(*own_loop, address, dial_with("s"));
    _exit(result ? 1 : result.error().code == ErrorCode::kAuthentication ? 0 : 2);
  }
  ASSERT_GT(child, 0);
  int status = -1;
  ASSERT_TRUE(drive_until(*loop, [&] { return waitpid(child, &status, WNOHANG) == child; }));
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(server.accepted.empty());
}

TEST(Acceptor, ReportsATakenPort) {
  const auto loop = make_loop();
  Server server(*loop, loopback(), accept_with(""));
  const auto second = Acceptor::create(*loop, server.address(), {}, [](Connection) {});
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(second.error().message, HasSubstr(server.address().to_string()));
}

}  // namespace
}  // namespace muster
