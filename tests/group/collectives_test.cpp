// The contract of a group over every transport, and tests that do not depend on the transport.
#include "contract/group_contract.h"
#include "io/certificates.h"
#include "muster/collective/algorithms/algorithms.h"

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

/// Simulates two hosts: the even ranks share memory, and the odd ranks are reached over the network only.
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

/// Runs a collective of `group` on values that differ for each rank and block. Returns the fault, or an empty string.
std::string fault_of(Group& group, Collective collective, size_t block) {
  const auto rank = static_cast<size_t>(group.membership().rank), size = static_cast<size_t>(group.membership().size);
  const size_t root = size - 1, total = block * size;
  const auto value = [](size_t from, size_t to) { return static_cast<int64_t>(100 * from + to); };
  const auto sum = [&](size_t to) { return static_cast<int64_t>(100 * size * (size - 1) / 2 + size * to); };
  std::vector<int64_t> whole(total), other(total), wanted(total);
  for (size_t i = 0; i < total; ++i) whole[i] = wanted[i] = value(rank, i / block);
  std::copy_n(whole.begin(), block, other.begin());
  const auto all = [](std::vector<int64_t>& of) { return BufferView{of.data(), of.size(), Dtype::kInt64}; };
  const BufferView one{other.data(), block, Dtype::kInt64}, none{nullptr, 0, Dtype::kInt64};
  const auto expect = [&](auto&& each) {
    for (size_t i = 0; i < total; ++i) wanted[i] = each(i / block);
  };
  Operation operation;
  operation.call.collective = collective;
  operation.call.root = static_cast<Rank>(root);
  operation.input = operation.output = all(whole);
  switch (collective) {
    case Collective::kAllReduce:
      expect(sum);
      break;
    case Collective::kReduce:
      if (rank == root) expect(sum);
      break;
    case Collective::kBroadcast:
      expect([&](size_t to) { return value(root, to); });
      break;
    case Collective::kGather:
      operation.output = rank == root ? all(whole) : none;
      [[fallthrough]];
    case Collective::kAllGather:
      operation.input = one;
      if (rank == root || collective == Collective::kAllGather) expect([&](size_t from) { return value(from, 0); });
      break;
    case Collective::kScatter:
      operation.input = rank == root ? all(whole) : none;
      operation.output = one;
      expect([&](size_t) { return value(root, rank); });
      break;
    case Collective::kReduceScatter:
      operation.output = one;
      expect([&](size_t) { return sum(rank); });
      break;
    case Collective::kAllToAll:
      operation.output = all(other);
      expect([&](size_t from) { return value(from, rank); });
      break;
    case Collective::kBarrier:
      break;
  }
  const auto result = group.submit(operation, {}).result();
  if (!result) return result.error().to_string();
  const bool into_other = operation.output.data() == static_cast<void*>(other.data());
  const auto& got = into_other ? other : whole;
  return std::equal(got.begin(), got.begin() + (into_other ? operation.output.count() : total), wanted.begin())
             ? ""
             : "wrong numbers";
}

TEST(Group, RunsEveryAlgorithmThatTheEnvironmentNames) {
  for (const Algorithm& each : algorithms()) {
    const std::string setting = std::string(name(each.collective)) + "=" + each.name;
    ASSERT_EQ(setenv("MUSTER_ALGO", setting.c_str(), 1), 0);
    for (const int size : {4, 5}) {
      run_group(size, "unix", [&](Group& group) {
        for (const size_t block : {1, 100, 60'000}) EXPECT_EQ(fault_of(group, each.collective, block), "") << setting;
      });
    }
  }
  ASSERT_EQ(unsetenv("MUSTER_ALGO"), 0);
}

TEST(Group, ReportsItsTransport) {
  run_group(2, "shm,unix,tcp", [](Group& group) { EXPECT_EQ(group.transport(), "shm"); });
  run_group(2, "unix,tcp", [](Group& group) { EXPECT_EQ(group.transport(), "unix"); });
  run_group(2, "tcp", [](Group& group) { EXPECT_EQ(group.transport(), "tcp"); });
  run_group(3, mixed,
            [](Group& group) { EXPECT_EQ(group.transport(), group.membership().rank == 1 ? "tcp" : "shm+tcp"); });
}

}  // namespace
}  // namespace muster
