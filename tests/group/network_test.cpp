// Groups whose links use the network: certificates, and the addresses that they listen on.
#include <sys/socket.h>

#include <algorithm>
#include <atomic>

#include "group/ranks.h"
#include "io/certificates.h"
#include "muster/group/shutdown_errors.h"
#include "muster/io/socket.h"
#include "muster/transport/links/link_table.h"

namespace muster {
namespace {

using test::options_for;
using test::run_group;
using test::run_ranks;

void expect_collectives(Group& group) {
  EXPECT_EQ(group.transport(), "tcp");
  const auto [rank, size, name, generation] = group.membership();
  constexpr size_t kCount = 100'003;
  std::vector<int32_t> data(kCount, rank + 1);
  const BufferView view{data.data(), kCount, Dtype::kInt32};
  ASSERT_TRUE(group.all_reduce(view, ReduceOp::kSum).result());
  EXPECT_EQ(std::count(data.begin(), data.end(), size * (size + 1) / 2), static_cast<int64_t>(kCount));
  std::fill(data.begin(), data.end(), rank);
  ASSERT_TRUE(group.broadcast(view, size - 1).result());
  EXPECT_EQ(std::count(data.begin(), data.end(), size - 1), static_cast<int64_t>(kCount));
  std::fill(data.begin(), data.end(), rank);
  std::vector<int32_t> all(kCount * size, -1);
  ASSERT_TRUE(group.all_gather(view, {all.data(), all.size(), Dtype::kInt32}).result());
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], static_cast<int32_t>(i / kCount));
}

TEST(GroupOverTls, RunsItsCollectives) {
  TestAuthority authority;
  auto options = options_for("tcp");
  options.credentials.tls = TlsContext::load(authority.issue("rank")).value();
  run_group(3, options, expect_collectives);
}

TEST(GroupOverTls, RefusesACertificateOfAnotherAuthority) {
  TestAuthority ours, another("another authority");
  const auto store = memory_store();
  run_ranks(2, [&](Rank rank) {
    auto options = options_for("tcp", std::chrono::seconds(3));
    options.credentials.tls = TlsContext::load((rank == 0 ? ours : another).issue("rank")).value();
    const auto group = Group::form(*store, {rank, 2, "test", 0}, options);
    ASSERT_FALSE(group);
    // The dialing rank is refused. The listening rank keeps waiting, because the refused connection may have come from
    // an unrelated process.
    const std::string text = group.error().to_string();
    EXPECT_EQ(group.error().code, rank == 1 ? ErrorCode::kAuthentication : ErrorCode::kTimeout) << text;
    EXPECT_EQ(group.error().rank, 1 - rank) << text;
    EXPECT_NE(text.find("certificate"), std::string::npos) << text;
  });
}

TEST(GroupOverTls, RefusesARankWithoutCertificates) {
  TestAuthority authority;
  const auto store = memory_store();
  run_ranks(2, [&](Rank rank) {
    auto options = options_for("tcp", std::chrono::seconds(3));
    if (rank == 0) options.credentials.tls = TlsContext::load(authority.issue("rank")).value();
    const auto group = Group::form(*store, {rank, 2, "test", 0}, options);
    ASSERT_FALSE(group);
    EXPECT_EQ(group.error().rank, 1 - rank) << group.error().to_string();
  });
}

class GroupInterface : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Loopback, GroupInterface, testing::Values("lo", "127.0.0.1", "::1"));

TEST_P(GroupInterface, CarriesTheLinks) {
  const std::string interface = GetParam();
  if (interface == "::1" && !listen_on(Address::parse("[::1]:0").value())) GTEST_SKIP() << "no IPv6 here";
  auto options = options_for("tcp");
  options.interface = interface;
  run_group(3, options, expect_collectives);
}

/// Sends messages in both directions. A receive that waits for a long time also dials its sender.
void expect_messages(Group& group) {
  const Rank self = group.membership().rank, peer = 1 - self;
  std::vector<int32_t> out(100'003, self), in(out.size(), -1);
  const Work sent = group.send({out.data(), out.size(), Dtype::kInt32}, peer, 0, {.async = true});
  for (const Work& work : {group.receive({in.data(), in.size(), Dtype::kInt32}, peer, 0), sent}) {
    const auto result = work.wait();
    ASSERT_TRUE(result) << result.error().to_string();
  }
  EXPECT_EQ(std::count(in.begin(), in.end(), peer), static_cast<int64_t>(in.size()));
}

int connected_tcp_sockets() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    sockaddr_storage peer{};
    socklen_t size = sizeof(peer);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0 && peer.ss_family == AF_INET) ++count;
  }
  return count;
}

TEST(GroupStreams, AreTheConnectionsOfALink) {
  for (const int streams : {1, 3}) {
    auto options = options_for("tcp");
    options.interface = "127.0.0.1";
    options.tcp_streams = streams;
    const int before = connected_tcp_sockets();
    std::atomic<int> seen = 0, seen_with_messages = 0;
    run_group(2, options, [&](Group& group) {
      expect_collectives(group);
      if (group.membership().rank == 0) seen = connected_tcp_sockets() - before;
      ASSERT_TRUE(group.barrier().result());
      expect_messages(group);
      if (group.membership().rank == 0) seen_with_messages = connected_tcp_sockets() - before;
      ASSERT_TRUE(group.barrier().result());
    });
    EXPECT_EQ(seen, 2 * streams);  // both ends are in this process
    EXPECT_EQ(seen_with_messages, 6 * streams);
  }
}

/// Rank 0 of two. Its link has two connections, which the test dials one by one.
class GroupStreamsOneByOne : public testing::Test {
 protected:
  /// The dial makes progress while a thread drives the loop.
  std::unique_ptr<Dial> dial(int subflow) {
    LinkIdentity peer = identity_;
    peer.rank = 1;
    peer.subflow = {subflow, 2};
    return connect_link(
        *loop_, Address::parse(address_).value(), peer, 0, patience_,
        [this, subflow](Result<std::unique_ptr<Link>> link) { subflows_[subflow] = std::move(link).value(); });
  }
  void wait_for(int subflow) {
    ASSERT_TRUE(loop_->run_until([&] { return subflows_[subflow] != nullptr; }, patience_));
  }
  Result<> link_with_peer() {
    return link_table_.connect({1}, patience_, [this] { return lost_; });
  }
  void SetUp() override {
    for (const Rank rank : {0, 1}) link_table_.set_endpoint(rank, {});
    link_table_.set_events({.lost = [this](Rank, LinkTable::Side, const Error& why) { lost_ = why; }});
    address_ = link_table_.listen(Address::parse("127.0.0.1:0").value(), Transport::kTcp).value();
  }

  const std::unique_ptr<Loop> loop_ = Loop::create().value();
  const Deadline patience_ = Deadline::after(std::chrono::seconds(60));
  const LinkIdentity identity_{0, 2, "test", 0, {to_bytes("a secret of the tests"), nullptr}};
  LinkTable link_table_{*loop_, identity_, 2};
  std::string address_;
  std::unique_ptr<Link> subflows_[2];  ///< the peer's ends of the connections
  std::optional<Error> lost_;
};

TEST_F(GroupStreamsOneByOne, EndTheWaitWhenAPeerDiesBetweenThem) {
  const auto attempt = dial(0);
  wait_for(0);
  subflows_[0].reset();
  const auto linked = link_with_peer();
  ASSERT_FALSE(linked);
  EXPECT_NE(linked.error().code, ErrorCode::kTimeout) << linked.error().to_string();
  EXPECT_EQ(linked.error().rank, 1);
}

TEST_F(GroupStreamsOneByOne, AreAcceptedFromAPeerThatHasLeft) {
  bool reported = false, left = false;
  link_table_.set_events(
      {.linked =
           [&](Rank rank, LinkTable::Side side, Link&) {
             EXPECT_EQ(rank, 1);
             EXPECT_EQ(side, LinkTable::Side::kAccepted);
             reported = true;
           },
       .lost = [&](Rank, LinkTable::Side, const Error& why) { left = reported && why.code == ErrorCode::kLeft; }});
  const auto first = dial(0);
  wait_for(0);
  subflows_[0]->close(has_left("rank 1", 1));
  const auto second = dial(1);
  const auto linked = link_with_peer();  // sees that the first connection has closed before it accepts the second one
  ASSERT_TRUE(linked) << linked.error().to_string();
  wait_for(1);
  subflows_[1]->close(has_left("rank 1", 1));
  ASSERT_TRUE(loop_->run_until([&] { return left; }, patience_));
}

TEST(GroupStreams, MustBeAsManyAtAllRanks) {
  const auto store = memory_store();
  run_ranks(2, [&](Rank rank) {
    auto options = options_for("tcp", std::chrono::seconds(3));
    options.tcp_streams = rank + 1;
    const auto group = Group::form(*store, {rank, 2, "test", 0}, options);
    ASSERT_FALSE(group);
    EXPECT_EQ(group.error().rank, 1 - rank);
    const std::string text = group.error().to_string();
    EXPECT_NE(text.find("MUSTER_TCP_STREAMS alike at all ranks"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace muster
