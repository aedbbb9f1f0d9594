#include "muster/torch/collectives.h"

#include <ATen/ATen.h>

#include <latch>

#include "torch/torch_ranks.h"

namespace muster {
namespace {

TEST(TensorCollectives, ReduceTensorsOfAnyStrides) {
  test::run_group(2, "shm", [](Group& group) {
    const float rank = static_cast<float>(group.membership().rank);
    const at::Tensor plain = at::full({3, 2}, rank + 1);
    all_reduce(group, plain);
    EXPECT_TRUE(at::equal(plain, at::full({3, 2}, 3.F)));

    const at::Tensor base = at::zeros({4, 6});
    const at::Tensor strided = base.t().slice(0, 0, 6, 2);
    strided.copy_(at::arange(12, at::kFloat).view({3, 4}) + rank);
    all_reduce(group, strided, ReduceOp::kAverage);
    EXPECT_TRUE(at::equal(strided, at::arange(12, at::kFloat).view({3, 4}) + 0.5F));
    EXPECT_EQ(base.slice(1, 1, 6, 2).abs().sum().item<float>(), 0) << "what lies between was not written";
  });
}

TEST(TensorCollectives, ReduceManyTensorsInOneOperation) {
  test::run_group(2, "shm", [](Group& group) {
    const int64_t rank = group.membership().rank;
    std::vector<at::Tensor> gradients;
    for (int64_t i = 1; i <= 5; ++i) gradients.push_back(at::full({i, 2}, static_cast<double>(i * (rank + 1))));
    const uint64_t before = group.sequence();
    all_reduce(group, gradients, ReduceOp::kSum);
    EXPECT_EQ(group.sequence(), before + 1);
    for (int64_t i = 1; i <= 5; ++i) {
      EXPECT_TRUE(at::equal(gradients[static_cast<size_t>(i - 1)], at::full({i, 2}, static_cast<double>(3 * i))));
    }
    all_reduce(group, std::vector<at::Tensor>{});
    const at::Tensor number = at::ones({1}).requires_grad_(), wide = at::ones({1}, at::kDouble);
    all_reduce(group, std::vector<at::Tensor>{number, wide});
    EXPECT_EQ(number.item<float>(), group.membership().size);
    EXPECT_EQ(wide.item<double>(), group.membership().size);
  });
}

TEST(TensorCollectives, BroadcastAndGather) {
  test::run_group(3, "shm", [](Group& group) {
    const int64_t rank = group.membership().rank;
    const at::Tensor weights = at::full({4}, rank, at::kLong);
    broadcast(group, weights, 2);
    EXPECT_TRUE(at::equal(weights, at::full({4}, 2, at::kLong)));

    const at::Tensor all = all_gather(group, at::full({2, 2}, rank, at::kShort).t());
    EXPECT_EQ(all.sizes(), (std::vector<int64_t>{3, 2, 2}));
    for (int64_t r = 0; r < 3; ++r) EXPECT_TRUE(at::equal(all[r], at::full({2, 2}, r, at::kShort)));
    barrier(group);
  });
}

TEST(TensorCollectives, MoveSlotsBetweenRanks) {
  test::run_group(3, "shm", [](Group& group) {
    const int64_t rank = group.membership().rank;
    const at::Tensor mine = at::arange(6, at::kFloat).view({3, 2}) + 10. * static_cast<double>(rank);

    const at::Tensor gathered = gather(group, mine, 1);
    EXPECT_EQ(gathered.defined(), rank == 1);
    if (rank == 1) {
      EXPECT_TRUE(at::equal(gathered[2], mine + 10.F));
    }

    const at::Tensor part = at::empty({2});
    scatter(group, mine, part, 2);
    EXPECT_TRUE(at::equal(part, at::arange(6, at::kFloat).view({3, 2})[rank] + 20.F));

    const at::Tensor sum = reduce_scatter(group, mine);
    EXPECT_TRUE(at::equal(sum, 3 * at::arange(6, at::kFloat).view({3, 2})[rank] + 30.F));

    const at::Tensor swapped = all_to_all(group, mine);
    for (int64_t r = 0; r < 3; ++r) {
      EXPECT_TRUE(at::equal(swapped[r], at::arange(6, at::kFloat).view({3, 2})[rank] + 10. * static_cast<double>(r)));
    }

    const at::Tensor total = mine.clone();
    reduce(group, total, ReduceOp::kMax, 0);
    EXPECT_TRUE(at::equal(total, rank == 0 ? mine + 20.F : mine));
    EXPECT_THROW(all_to_all(group, at::zeros({2, 2})), c10::ValueError);
    barrier(group);
  });
}

TEST(TensorCollectives, SendAndReceive) {
  test::run_group(2, "shm", [](Group& group) {
    if (group.membership().rank == 0) {
      send(group, at::arange(6, at::kLong).view({2, 3}).t(), 1, 4);
    } else {
      const at::Tensor received = at::zeros({2, 3}, at::kLong).t();
      EXPECT_EQ(recv(group, received, kAnyRank, 4), 0);
      EXPECT_TRUE(at::equal(received, at::arange(6, at::kLong).view({2, 3}).t()));
    }
    barrier(group);
  });
}

TEST(TensorCollectives, ThrowErrorsOfTheCore) {
  std::latch formed(2);  // an abort would also end a group that still forms at the other rank
  test::run_group(2, "shm", [&formed](Group& group) {
    formed.arrive_and_wait();
    group.abort({ErrorCode::kPeerLost, "rank 1 went away", 1});
    try {
      barrier(group);
      FAIL() << "an aborted group has no barrier";
    } catch (const ErrorException& exception) {
      EXPECT_EQ(exception.error().rank, 1);
      EXPECT_NE(std::string(exception.what()).find("rank 1 went away"), std::string::npos) << exception.what();
    }
    EXPECT_THROW(all_reduce(group, at::empty({1}, at::kMeta)), c10::NotImplementedError);
  });
}

TEST(AsyncCollectives, ReturnTheResultsOfTheBlockingCalls) {
  test::run_group(2, "shm", [](Group& group) {
    const int64_t rank = group.membership().rank;
    const at::Tensor base = at::full({6, 4}, static_cast<double>(rank + 1));
    const at::Tensor slots = at::arange(4, at::kLong).view({2, 2}) + 10 * rank;
    const AsyncWork reduced = async::all_reduce(group, base.t());
    const AsyncWork gathered = async::all_gather(group, at::full({3}, rank, at::kLong));  // keeps the temporary
    const AsyncWork scattered = async::reduce_scatter(group, slots);
    const AsyncWork swapped = async::all_to_all(group, slots);
    const AsyncWork rooted = async::reduce(group, at::full({2}, rank + 1, at::kLong), ReduceOp::kSum, 1);
    const AsyncWork broadcasted = async::broadcast(group, at::full({2}, rank, at::kLong), 1);
    EXPECT_FALSE(async::barrier(group).wait().defined());
    EXPECT_TRUE(at::equal(reduced.wait(), at::full({4, 6}, 3.F)));
    EXPECT_TRUE(at::equal(base, at::full({6, 4}, 3.F)));
    EXPECT_TRUE(at::equal(gathered.wait()[1], at::full({3}, 1, at::kLong)));
    EXPECT_TRUE(at::equal(scattered.wait(), 2 * at::arange(4, at::kLong).view({2, 2})[rank] + 10));
    EXPECT_TRUE(at::equal(swapped.wait()[1], at::arange(4, at::kLong).view({2, 2})[rank] + 10));
    EXPECT_EQ(rooted.wait()[0].item<int64_t>(), rank == 1 ? 3 : 1);
    EXPECT_EQ(broadcasted.wait()[0].item<int64_t>(), 1);
  });
}

TEST(AsyncCollectives, CompleteWhenThePeerHasCalled) {
  std::latch polled(1);
  test::run_group(2, "shm", [&polled](Group& group) {
    const at::Tensor ones = at::ones({10});
    if (group.membership().rank == 0) {
      const AsyncWork pending = async::all_reduce(group, ones);
      EXPECT_FALSE(pending.is_completed());
      EXPECT_THROW(pending.wait(1ms), ErrorException);
      polled.count_down();
      EXPECT_EQ(pending.wait().sum().item<float>(), 20);
      EXPECT_TRUE(pending.is_completed());
      const AsyncWork received = async::recv(group, at::empty({2}), kAnyRank, 7);
      EXPECT_EQ(received.wait(Duration::max()).sum().item<float>(), 2);
      EXPECT_EQ(received.source(), 1);
    } else {
      polled.wait();
      async::all_reduce(group, ones);  // continues without its handle
      async::send(group, at::ones({2}), 0, 7).wait();
    }
  });
}

TEST(AsyncCollectives, ThrowTheErrorOfTheCall) {
  std::latch formed(2);
  test::run_group(2, "shm", [&formed](Group& group) {
    formed.arrive_and_wait();
    group.abort({ErrorCode::kPeerLost, "rank 1 went away", 1});
    EXPECT_THROW(async::all_reduce(group, at::ones({2})).wait(), ErrorException);
    EXPECT_THROW(async::all_to_all(group, at::ones({3, 2})), c10::ValueError);
  });
}

}  // namespace
}  // namespace muster
