// The contract of a group, over every transport, and what is common to all of them.
#include "contract/group_contract.h"
#include "io/certificates.h"

namespace muster {
namespace {

using test::options_for;
using test::run_group;

GroupKind over(const std::string& name, const std::string& transports) {
  return {name, [transports](Rank) { return options_for(transports); }};
}

GroupOptions with_certificates(Rank) {
  static TestAuthority authority;
  static const auto context = TlsContext::load(authority.issue("rank")).value();
  auto options = options_for("tcp");
  options.credentials.tls = context;
  return options;
}

GroupOptions in_streams(Rank) {
  auto options = options_for("tcp");
  options.tcp_streams = 3;
  return options;
}

/// As over two hosts: the ranks of one share memory, the others are reached over the network alone.
GroupOptions mixed(Rank rank) { return options_for(rank % 2 == 0 ? "shm,tcp" : "tcp"); }

INSTANTIATE_TEST_SUITE_P(Shm, GroupContract, group_sizes(over("Shm", "shm,unix,tcp"), {1, 2, 3, 4, 7}), group_name);
INSTANTIATE_TEST_SUITE_P(Unix, GroupContract, group_sizes(over("Unix", "unix,tcp"), {2, 3, 7}), group_name);
INSTANTIATE_TEST_SUITE_P(Tcp, GroupContract, group_sizes(over("Tcp", "tcp"), {4, 5}), group_name);
INSTANTIATE_TEST_SUITE_P(TcpStreams, GroupContract, group_sizes({"TcpStreams", in_streams}, {3}), group_name);
INSTANTIATE_TEST_SUITE_P(TcpTls, GroupContract, group_sizes({"TcpTls", with_certificates}, {2}), group_name);
INSTANTIATE_TEST_SUITE_P(Mixed, GroupContract, group_sizes({"Mixed", mixed}, {4, 7}), group_name);

TEST(Group, SeveralGroupsWorkAtOnceFromSeveralThreads) {
  const auto store = memory_store();
  test::run_ranks(3, [&](Rank rank) {
    std::vector<std::thread> threads;
    for (const char* name : {"a", "b"}) {
      threads.emplace_back([&, name] {
        const auto handle = store->clone();
        const auto group = Group::form(**handle, {rank, 3, name, 0}, test::options_for("shm,unix,tcp"));
        ASSERT_TRUE(group) << group.error().to_string();
        for (int i = 0; i < 200; ++i) {
          int64_t value = rank;
          ASSERT_TRUE((*group)->all_reduce({&value, 1, Dtype::kInt64}, ReduceOp::kSum).result());
          ASSERT_EQ(value, 3);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST(Group, SaysWhichTransportItUses) {
  run_group(2, "shm,unix,tcp", [](Group& group) { EXPECT_EQ(group.transport(), "shm"); });
  run_group(2, "unix,tcp", [](Group& group) { EXPECT_EQ(group.transport(), "unix"); });
  run_group(2, "tcp", [](Group& group) { EXPECT_EQ(group.transport(), "tcp"); });
  run_group(3, mixed,
            [](Group& group) { EXPECT_EQ(group.transport(), group.membership().rank == 1 ? "tcp" : "shm+tcp"); });
}

}  // namespace
}  // namespace muster
