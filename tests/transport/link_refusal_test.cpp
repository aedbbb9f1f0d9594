// Two processes that do not belong to one group. Both ends must get an error that names both values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "muster/io/connect/handshake.h"
#include "muster/io/socket.h"
#include "muster/transport/link_hello.h"
#include "transport/link_kinds.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class LinkRefusal : public testing::TestWithParam<ProcessLinkKind> {
 protected:
  struct Ends {
    Error connector;
    std::string acceptor;  // the acceptor's log output
  };

  /// Connects and expects both ends to fail.
  Ends refuse(LinkIdentity listening, LinkIdentity connecting, Rank expected) {
    testing::internal::CaptureStderr();
    auto loop = Loop::create();
    int accepted = 0;
    auto listener = GetParam().listen(**loop, std::move(listening), [&](std::unique_ptr<Link>) { ++accepted; });
    EXPECT_TRUE(listener);
    Ends ends;
    bool done = false;
    const auto dial = GetParam().connect(**loop, (*listener)->address(), std::move(connecting), expected,
                                         test_deadline(), [&](Result<std::unique_ptr<Link>> link) {
                                           done = true;
                                           EXPECT_FALSE(link);
                                           if (!link) ends.connector = link.error();
                                         });
    EXPECT_TRUE((*loop)->run_until([&] { return done; }, test_deadline()));
    while ((*loop)->run_once(Deadline::after(std::chrono::milliseconds(50)))) {
    }
    EXPECT_EQ(accepted, 0);
    ends.acceptor = testing::internal::GetCapturedStderr();
    return ends;
  }
  LinkIdentity identity(Rank rank) { return GetParam().identity(rank); }
};

TEST_P(LinkRefusal, NamesBothWorldSizes) {
  LinkIdentity other = identity(1);
  other.size = 3;
  const Ends ends = refuse(identity(0), other, 0);
  EXPECT_EQ(ends.connector.code, ErrorCode::kMismatch);
  EXPECT_THAT(ends.connector.message, AllOf(HasSubstr("world size 8"), HasSubstr("has 3")));
  EXPECT_THAT(ends.acceptor, AllOf(HasSubstr("world size 3"), HasSubstr("has 8")));
}

TEST_P(LinkRefusal, NamesBothNumbersOfConnections) {
  LinkIdentity other = identity(1);
  other.subflow = {2, 4};
  const Ends ends = refuse(identity(0), other, 0);
  EXPECT_EQ(ends.connector.code, ErrorCode::kMismatch);
  EXPECT_THAT(ends.connector.message, AllOf(HasSubstr("of 1 connections"), HasSubstr("rank 1 of 4")));
  EXPECT_THAT(ends.acceptor, AllOf(HasSubstr("of 4 connections"), HasSubstr("rank 0 of 1")));
}

TEST_P(LinkRefusal, NamesBothGroups) {
  LinkIdentity other = identity(1);
  other.group = "other";
  const Ends ends = refuse(identity(0), other, 0);
  EXPECT_EQ(ends.connector.code, ErrorCode::kMismatch);
  for (const std::string& text : {ends.connector.message, ends.acceptor}) {
    EXPECT_THAT(text, AllOf(HasSubstr("\"test\""), HasSubstr("\"other\"")));
  }
}

TEST_P(LinkRefusal, NamesBothGenerations) {
  LinkIdentity other = identity(1);
  other.generation = 8;
  const Ends ends = refuse(identity(0), other, 0);
  EXPECT_EQ(ends.connector.code, ErrorCode::kMismatch);
  for (const std::string& text : {ends.connector.message, ends.acceptor}) {
    EXPECT_THAT(text, AllOf(HasSubstr("generation 7"), HasSubstr("generation 8")));
  }
}

TEST_P(LinkRefusal, NamesTheRankThatAnsweredForAnother) {
  const Ends ends = refuse(identity(0), identity(1), 2);
  EXPECT_EQ(ends.connector.code, ErrorCode::kMismatch);
  for (const std::string& text : {ends.connector.message, ends.acceptor}) {
    EXPECT_THAT(text, AllOf(HasSubstr("rank 0"), HasSubstr("dialed rank 2")));
  }
}

TEST_P(LinkRefusal, FindsTwoProcessesOfOneRank) {
  const Ends ends = refuse(identity(0), identity(0), 0);
  EXPECT_EQ(ends.connector.code, ErrorCode::kMismatch);
  EXPECT_THAT(ends.acceptor, HasSubstr("two processes with one rank"));
}

TEST_P(LinkRefusal, RefusesAPeerWithoutTheSecret) {
  LinkIdentity other = identity(1);
  other.credentials.secret = to_bytes("a guess");
  const Ends ends = refuse(identity(0), other, 0);
  EXPECT_EQ(ends.connector.code, ErrorCode::kAuthentication);
  EXPECT_THAT(ends.connector.message, HasSubstr("rank 0"));
  EXPECT_THAT(ends.acceptor, HasSubstr("refused"));
}

TEST_P(LinkRefusal, RefusesARankOutOfRange) {
  auto loop = Loop::create();
  LinkIdentity self = identity(8);
  const auto listener = GetParam().listen(**loop, self, [](std::unique_ptr<Link>) {});
  ASSERT_FALSE(listener);
  EXPECT_EQ(listener.error().code, ErrorCode::kInvalidArgument);
  Result<> outcome;
  bool done = false;
  const auto dial = GetParam().connect(**loop, GetParam().address().to_string(), self, 0, test_deadline(),
                                       [&](Result<std::unique_ptr<Link>> link) {
                                         done = true;
                                         if (!link) outcome = tl::unexpected(link.error());
                                       });
  EXPECT_FALSE(done) << "a handler must not run before connect returned";
  ASSERT_TRUE((*loop)->run_until([&] { return done; }, test_deadline()));
  EXPECT_EQ(outcome.error().code, ErrorCode::kInvalidArgument);
}

TEST_P(LinkRefusal, NamesThePeerThatDidNotAnswerInTime) {
  auto loop = Loop::create();
  Error error;
  bool done = false;
  const Address base = GetParam().address();
  const std::string address = base.is_unix() ? base.to_string() : base.with_port(1).to_string();
  const auto dial = GetParam().connect(**loop, address, identity(1), 0, Deadline::after(100ms),
                                       [&](Result<std::unique_ptr<Link>> link) {
                                         done = true;
                                         if (!link) error = link.error();
                                       });
  ASSERT_TRUE((*loop)->run_until([&] { return done; }, test_deadline()));
  EXPECT_EQ(error.code, ErrorCode::kTimeout);
  EXPECT_EQ(error.rank, 0);
  EXPECT_THAT(error.message, AllOf(HasSubstr("rank 0"), HasSubstr(address)));
}

/// A socket that is closed with bytes unread resets the connection, and the reset could overtake the reason.
TEST_P(LinkRefusal, EndsTheConnectionWithoutAReset) {
  const Credentials credentials = GetParam().credentials();
  if (credentials.tls) GTEST_SKIP() << "speaks the handshake by hand";
  const auto loop = *Loop::create();
  const auto listener = GetParam().listen(*loop, identity(0), [](std::unique_ptr<Link>) { ADD_FAILURE(); });
  ASSERT_TRUE(listener);
  LinkIdentity other = identity(1);
  other.generation = 8;
  const auto wire = GetParam().shm ? LinkHello::Wire::kShm : LinkHello::Wire::kSocket;
  Handshake handshake(Handshake::Side::kClient, credentials.secret, encode(*make_hello(other, wire)));
  const Fd socket = std::move(*start_connect(*Address::parse((*listener)->address())));
  Bytes output = handshake.take_output(), received(4096);
  ssize_t got = -1;
  for (const Deadline deadline = test_deadline(); got != 0 && !deadline.passed();) {
    const ssize_t sent = send(socket.get(), output.data(), output.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) output.clear();
    loop->poll();
    got = recv(socket.get(), received.data(), received.size(), MSG_DONTWAIT);
    ASSERT_TRUE(got >= 0 || errno == EAGAIN) << std::strerror(errno);
    if (got <= 0 || handshake.done()) continue;
    ASSERT_TRUE(handshake.feed(ByteView(received).first(got)));
    output = handshake.take_output();
    if (!output.empty()) output.resize(output.size() + 100'000);  // more bytes after the proof than one read takes
  }
  EXPECT_TRUE(handshake.done());
  EXPECT_EQ(got, 0);
}

TEST_P(LinkRefusal, StaysSilentWhenTheDialIsDestroyed) {
  auto loop = Loop::create();
  int accepted = 0, called = 0;
  auto listener = GetParam().listen(**loop, identity(0), [&](std::unique_ptr<Link>) { ++accepted; });
  for (int turns = 0; turns < 12; ++turns) {  // destroys the dial a little later each time
    auto dial = GetParam().connect(**loop, (*listener)->address(), identity(1), 0, test_deadline(),
                                   [&](Result<std::unique_ptr<Link>>) { ++called; });
    for (int i = 0; i < turns && called == 0; ++i) (*loop)->poll();
    const int before = called;
    dial.reset();
    while ((*loop)->run_once(Deadline::after(10ms))) {
    }
    EXPECT_EQ(called, before);
    called = 0;
  }
}

INSTANTIATE_TEST_SUITE_P(Process, LinkRefusal, testing::ValuesIn(process_link_kinds()),
                         [](const auto& info) { return info.param.name; });

TEST(ShmLink, NeedsAUnixSocket) {
  auto loop = Loop::create();
  const Address tcp = Address::parse("127.0.0.1:0").value();
  const auto listener = listen_shm_links(**loop, tcp, LinkIdentity{0, 2, "test", 0, {}}, [](std::unique_ptr<Link>) {});
  ASSERT_FALSE(listener);
  EXPECT_EQ(listener.error().code, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace muster
