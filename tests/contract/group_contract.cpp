#include "contract/group_contract.h"

#include <algorithm>
#include <cstring>

namespace muster {

namespace {

const size_t kCounts[] = {0, 1, 7, 1000, 40'000, 700'001};

}  // namespace

TEST_P(GroupContract, AllReduceSumsInPlace) {
  run([&](Group& group) {
    for (const size_t count : kCounts) {
      std::vector<float> data(count);
      for (size_t i = 0; i < count; ++i) data[i] = static_cast<float>(i % 100 + group.membership().rank);
      const auto result = group.all_reduce({data.data(), count, Dtype::kFloat32}, ReduceOp::kSum).result();
      ASSERT_TRUE(result) << result.error().to_string();
      for (size_t i = 0; i < count; ++i) {
        const int expected = static_cast<int>(i % 100) * size() + size() * (size() - 1) / 2;
        ASSERT_EQ(data[i], static_cast<float>(expected)) << "element " << i << " of " << count;
      }
    }
  });
}

TEST_P(GroupContract, AverageDividesTheSum) {
  run([&](Group& group) {
    std::vector<double> data(100'003, 10.0 * group.membership().rank);
    const auto result = group.all_reduce({data.data(), data.size(), Dtype::kFloat64}, ReduceOp::kAverage).result();
    ASSERT_TRUE(result) << result.error().to_string();
    for (const double value : data) ASSERT_DOUBLE_EQ(value, 10.0 * (size() - 1) / 2);
  });
}

TEST_P(GroupContract, AllRanksEndWithTheSameBits) {
  run([&](Group& group) {
    const Rank rank = group.membership().rank;
    std::vector<float> data(300'000);
    for (size_t i = 0; i < data.size(); ++i) data[i] = 1.0f / static_cast<float>(i * (rank + 3) + 7);
    ASSERT_TRUE(group.all_reduce({data.data(), data.size(), Dtype::kFloat32}, ReduceOp::kSum).result());
    std::vector<float> of_rank_0 = data;
    ASSERT_TRUE(group.broadcast({of_rank_0.data(), of_rank_0.size(), Dtype::kFloat32}, 0).result());
    ASSERT_EQ(std::memcmp(data.data(), of_rank_0.data(), data.size() * sizeof(float)), 0);
  });
}

TEST_P(GroupContract, BroadcastCopiesTheRootsData) {
  run([&](Group& group) {
    for (Rank root = 0; root < size(); ++root) {
      for (const size_t count : kCounts) {
        std::vector<int32_t> data(count, group.membership().rank == root ? 1000 + root : -1);
        ASSERT_TRUE(group.broadcast({data.data(), count, Dtype::kInt32}, root).result());
        ASSERT_EQ(std::count(data.begin(), data.end(), 1000 + root), static_cast<int64_t>(count));
      }
    }
  });
}

TEST_P(GroupContract, AllGatherKeepsRankOrder) {
  run([&](Group& group) {
    for (const size_t count : kCounts) {
      const std::vector<int64_t> input(count, group.membership().rank + 5);
      std::vector<int64_t> output(count * size(), -1);
      const BufferView view{const_cast<int64_t*>(input.data()), count, Dtype::kInt64};
      ASSERT_TRUE(group.all_gather(view, {output.data(), output.size(), Dtype::kInt64}).result());
      for (size_t i = 0; i < output.size(); ++i) ASSERT_EQ(output[i], static_cast<int64_t>(i / count) + 5);
    }
  });
}

TEST_P(GroupContract, AllGatherReadsItsInputFromTheOutput) {
  run([&](Group& group) {
    const Rank rank = group.membership().rank;
    constexpr size_t kCount = 50'000;
    std::vector<int16_t> output(kCount * size(), -1);
    std::fill_n(output.begin() + rank * kCount, kCount, static_cast<int16_t>(rank));
    ASSERT_TRUE(group
                    .all_gather({output.data() + rank * kCount, kCount, Dtype::kInt16},
                                {output.data(), output.size(), Dtype::kInt16})
                    .result());
    for (size_t i = 0; i < output.size(); ++i) ASSERT_EQ(output[i], static_cast<int16_t>(i / kCount));
  });
}

TEST_P(GroupContract, AsyncCallsRunInOrderAndOverlapWithTheCaller) {
  run([&](Group& group) {
    constexpr int kCalls = 50;
    std::vector<std::vector<int32_t>> data(kCalls, std::vector<int32_t>(1000, 1));
    std::vector<Work> works;
    for (auto& each : data) {
      works.push_back(group.all_reduce({each.data(), each.size(), Dtype::kInt32}, ReduceOp::kSum, {.async = true}));
    }
    // A sync call waits behind the async calls.
    ASSERT_TRUE(group.barrier().result());
    for (const Work& work : works) ASSERT_TRUE(work.done());
    for (const auto& each : data) ASSERT_EQ(std::count(each.begin(), each.end(), size()), 1000);
    EXPECT_EQ(group.sequence(), kCalls + 1u);
  });
}

TEST_P(GroupContract, RanksSendToEachOtherAndReceiveAtOnce) {
  run([&](Group& group) {
    const Rank self = group.membership().rank;
    constexpr size_t kElements = 100'000;  // more than a message that is sent before its receive
    std::vector<std::vector<float>> sent(static_cast<size_t>(size())), received(sent.size());
    std::vector<Message> messages;
    for (Rank peer = 0; peer < size(); ++peer) {
      if (peer == self) continue;
      auto& out = sent[static_cast<size_t>(peer)];
      auto& in = received[static_cast<size_t>(peer)];
      out.assign(kElements, static_cast<float>(10 * self + peer));
      in.assign(kElements, -1);
      messages.push_back({{out.data(), kElements, Dtype::kFloat32}, peer, 0, true});
      messages.push_back({{in.data(), kElements, Dtype::kFloat32}, peer, 0, false});
    }
    for (const Work& each : group.exchange(messages)) {
      const Result<> result = each.wait();
      ASSERT_TRUE(result) << result.error().to_string();
    }
    for (Rank peer = 0; peer < size(); ++peer) {
      if (peer == self) continue;
      for (const float value : received[static_cast<size_t>(peer)]) ASSERT_EQ(value, 10 * peer + self);
    }
  });
}

TEST_P(GroupContract, ADuplicateHasTheSameRanks) {
  run([&](Group& group) {
    const auto duplicate = group.duplicate("own");
    ASSERT_TRUE(duplicate) << duplicate.error().to_string();
    const GroupSpec &own = (*duplicate)->membership(), &before = group.membership();
    EXPECT_EQ(own.rank, before.rank);
    EXPECT_EQ(own.size, before.size);
    EXPECT_EQ(own.name, before.name + "/own");
    EXPECT_EQ((*duplicate)->transport(), group.transport());
    EXPECT_NE((*duplicate)->id(), group.id());
    for (Group* const each : {&group, duplicate->get()}) {
      int32_t sum = 1;
      ASSERT_TRUE(each->all_reduce({&sum, 1, Dtype::kInt32}, ReduceOp::kSum).wait());
      EXPECT_EQ(sum, size());
    }
  });
}

TEST_P(GroupContract, MixedCallsReuseTheSharedSlotsSafely) {
  run([&](Group& group) {
    const Rank rank = group.membership().rank;
    for (int round = 0; round < 60; ++round) {
      const Rank root = round % size();
      std::vector<int32_t> data(1 + (round * 977) % 90'000, rank == root ? round : -1);
      ASSERT_TRUE(group.broadcast({data.data(), data.size(), Dtype::kInt32}, root).result());
      ASSERT_EQ(std::count(data.begin(), data.end(), round), static_cast<int64_t>(data.size()));
      ASSERT_TRUE(group.all_reduce({data.data(), data.size(), Dtype::kInt32}, ReduceOp::kMax).result());
      ASSERT_EQ(std::count(data.begin(), data.end(), round), static_cast<int64_t>(data.size()));
      ASSERT_TRUE(group.barrier().result());
    }
  });
}

}  // namespace muster
