// Groups whose links go over the network: certificates, and which addresses they listen on.
#include <algorithm>

#include "group/ranks.h"
#include "io/certificates.h"
#include "muster/io/socket.h"

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
    // The one that dials is refused; the one that listens waits on, for whom it refused may have been a stranger.
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

}  // namespace
}  // namespace muster
