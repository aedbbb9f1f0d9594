// Point-to-point messages between ranks as threads, over every kind of link.
#include <future>
#include <latch>

#include "group/ranks.h"

namespace muster {
namespace {

using Floats = std::vector<float>;

BufferView view(Floats& data) { return {data.data(), data.size(), Dtype::kFloat32}; }

Floats pattern(size_t count, int salt) {
  Floats data(count);
  for (size_t i = 0; i < count; ++i) data[i] = static_cast<float>((i * 7 + salt) % 100'003);
  return data;
}

void expect_done(const Work& work) {
  const auto result = work.wait();
  EXPECT_TRUE(result) << result.error().to_string();
}

Error error_of(const Work& work) {
  const auto result = work.wait();
  EXPECT_FALSE(result);
  return result ? Error{} : result.error();
}

constexpr CallOptions kAsync{.async = true};

class Messages : public testing::TestWithParam<const char*> {};

TEST_P(Messages, ArriveCompleteAtEveryLength) {
  test::run_group(2, GetParam(), [](Group& group) {
    const bool sends = group.membership().rank == 0;
    for (const size_t count : {0u, 1u, 2u, 1000u, 8192u, 8193u, 100'000u, 3'000'001u}) {
      const Floats expected = pattern(count, static_cast<int>(count));
      Floats data = sends ? expected : Floats(count);
      expect_done(sends ? group.send(view(data), 1, 5) : group.receive(view(data), 0, 5));
      EXPECT_EQ(data, expected);
    }
  });
}

TEST_P(Messages, MayBeInSeveralSegments) {
  test::run_group(2, GetParam(), [](Group& group) {
    for (const size_t count : {10u, 100'000u}) {
      Floats a = pattern(count, 1), b = pattern(3 * count, 2);
      if (group.membership().rank == 0) {
        const BufferView both({{a.data(), a.size() * 4}, {b.data(), b.size() * 4}}, Dtype::kFloat32);
        expect_done(group.send(both, 1, 0));
      } else {
        Floats c(2 * count), d(2 * count);
        const BufferView both({{c.data(), c.size() * 4}, {d.data(), d.size() * 4}}, Dtype::kFloat32);
        expect_done(group.receive(both, 0, 0));
        a.insert(a.end(), b.begin(), b.end());
        c.insert(c.end(), d.begin(), d.end());
        EXPECT_EQ(c, a);
      }
    }
  });
}

TEST_P(Messages, MatchInOrderByTag) {
  test::run_group(2, GetParam(), [](Group& group) {
    constexpr int kCount = 50;
    // Alternates short and long messages, because they use different protocols.
    const auto length = [](int i) { return i % 3 == 0 ? size_t{20'000} : static_cast<size_t>(i % 5); };
    std::vector<Floats> data;
    std::vector<Work> works;
    if (group.membership().rank == 0) {
      for (int i = 0; i < kCount; ++i) data.push_back(pattern(length(i), i));
      for (int i = 0; i < kCount; ++i) works.push_back(group.send(view(data[i]), 1, i % 2, kAsync));
    } else {
      for (int i = 0; i < kCount; ++i) data.emplace_back(length(i));
      for (int i = 1; i < kCount; i += 2) works.push_back(group.receive(view(data[i]), 0, 1, kAsync));
      for (int i = 0; i < kCount; i += 2) works.push_back(group.receive(view(data[i]), 0, 0, kAsync));
    }
    for (auto work = works.rbegin(); work != works.rend(); ++work) expect_done(*work);
    for (int i = 0; i < kCount; ++i) EXPECT_EQ(data[i], pattern(length(i), i)) << i;
  });
}

TEST_P(Messages, FromAnyRankNameTheirSender) {
  constexpr int kSize = 4;
  test::run_group(kSize, GetParam(), [](Group& group) {
    const Rank self = group.membership().rank;
    for (const size_t count : {3u, 50'000u}) {
      if (self != 0) {
        Floats data = pattern(count, self);
        expect_done(group.send(view(data), 0, static_cast<uint32_t>(count)));
        continue;
      }
      std::vector<int> seen(kSize);
      for (int i = 1; i < kSize; ++i) {
        Floats data(count);
        const Work work = group.receive(view(data), kAnyRank, static_cast<uint32_t>(count), kAsync);
        expect_done(work);
        const Rank from = work.source();
        ASSERT_TRUE(from > 0 && from < kSize);
        ++seen[from];
        EXPECT_EQ(data, pattern(count, from));
      }
      EXPECT_EQ(seen, (std::vector<int>{0, 1, 1, 1}));
    }
  });
}

TEST_P(Messages, MayCross) {
  test::run_group(2, GetParam(), [](Group& group) {
    const Rank peer = 1 - group.membership().rank;
    constexpr size_t kCount = 2 << 20;
    for (const bool receive_first : {true, false}) {
      Floats out = pattern(kCount, peer), in(kCount);
      std::vector<Work> works;
      if (receive_first) works.push_back(group.receive(view(in), peer, 1, kAsync));
      works.push_back(group.send(view(out), peer, 1, kAsync));
      if (!receive_first) works.push_back(group.receive(view(in), peer, 1, kAsync));
      for (const Work& work : works) expect_done(work);
      EXPECT_EQ(in, pattern(kCount, 1 - peer));
    }
  });
}

TEST_P(Messages, MayBePostedAndAwaitedInAnyOrder) {
  constexpr int kSize = 3;
  test::run_group(kSize, GetParam(), [](Group& group) {
    const Rank self = group.membership().rank;
    const Rank next = (self + 1) % kSize, previous = (self + kSize - 1) % kSize;
    constexpr int kCount = 1000;
    const auto length = [](int i) { return i % 10 == 0 ? size_t{9000} : size_t{16}; };
    std::vector<Floats> out, in;
    for (int i = 0; i < kCount; ++i) out.push_back(pattern(length(i), i + self));
    for (int i = 0; i < kCount; ++i) in.emplace_back(length(i));
    std::vector<Work> works;
    for (int i = 0; i < kCount; ++i) {
      const int last = kCount - 1 - i;
      works.push_back(group.receive(view(in[last]), previous, last, kAsync));
      works.push_back(group.send(view(out[i]), next, i, kAsync));
    }
    for (auto work = works.rbegin(); work != works.rend(); ++work) expect_done(*work);
    for (int i = 0; i < kCount; ++i) ASSERT_EQ(in[i], pattern(length(i), i + previous)) << i;
  });
}

TEST_P(Messages, ProgressWithoutWaits) {
  test::run_group(2, GetParam(), [](Group& group) {
    Floats data = pattern(1 << 20, 3);
    if (group.membership().rank == 0) {
      std::promise<Result<>> done;
      group.send(view(data), 1, 0, kAsync).on_done([&](const Result<>& result) { done.set_value(result); });
      EXPECT_TRUE(done.get_future().get());
    } else {
      Floats in(data.size());
      std::promise<Result<>> done;
      const Work work = group.receive(view(in), 0, 0, kAsync);
      work.on_done([&](const Result<>& result) { done.set_value(result); });
      EXPECT_TRUE(done.get_future().get());
      EXPECT_EQ(in, data);
    }
  });
}

TEST_P(Messages, MayBeAwaitedByACallbackOfAnother) {
  test::run_group(2, GetParam(), [](Group& group) {
    const Rank peer = 1 - group.membership().rank;
    Floats out = pattern(20'000, 1), first(out.size()), second(out.size());
    std::promise<Result<>> done;
    const Work later = group.receive(view(second), peer, 2, kAsync);
    const Work receive = group.receive(view(first), peer, 1, kAsync);
    receive.on_done([&](const Result<>&) {
      expect_done(group.send(view(out), peer, 2));
      done.set_value(later.wait());
    });
    const Work send = group.send(view(out), peer, 1, kAsync);
    EXPECT_TRUE(done.get_future().get());
    expect_done(send);
    EXPECT_EQ(second, out);
  });
}

TEST_P(Messages, RunBesideCollectives) {
  test::run_group(2, GetParam(), [](Group& group) {
    const Rank self = group.membership().rank;
    Floats out = pattern(300'000, self), in(out.size()), sum(1000, 1.0f);
    const Work receive = group.receive(view(in), 1 - self, 0, kAsync);
    const Work send = group.send(view(out), 1 - self, 0, kAsync);
    for (int i = 0; i < 20; ++i) expect_done(group.all_reduce(view(sum), ReduceOp::kMax));
    expect_done(send);
    expect_done(receive);
    EXPECT_EQ(in, pattern(in.size(), 1 - self));
  });
}

TEST_P(Messages, OfManyThreadsAreSeparatedByTag) {
  test::run_group(2, GetParam(), [](Group& group) {
    const Rank peer = 1 - group.membership().rank;
    test::run_ranks(4, [&](int thread) {
      for (int i = 0; i < 50; ++i) {
        Floats out = pattern(i % 7 == 0 ? 30'000 : 5, 100 * thread + i), in(out.size());
        const Work receive = group.receive(view(in), peer, thread, kAsync);
        const Work send = group.send(view(out), peer, thread, kAsync);
        expect_done(send);
        expect_done(receive);
        EXPECT_EQ(in, out);
      }
    });
  });
}

TEST_P(Messages, DoNotBlockShortSendsUntilReceived) {
  test::run_group(2, GetParam(), [](Group& group) {
    constexpr int kCount = 20;
    if (group.membership().rank == 0) {
      for (int i = 0; i < kCount; ++i) {
        Floats data = pattern(100, i);
        expect_done(group.send(view(data), 1, i));  // the buffer is destroyed here, so the send must have copied it
      }
    }
    expect_done(group.barrier());
    if (group.membership().rank == 1) {
      for (int i = kCount - 1; i >= 0; --i) {
        Floats data(100);
        expect_done(group.receive(view(data), 0, i));
        EXPECT_EQ(data, pattern(100, i));
      }
    }
  });
}

TEST_P(Messages, BeyondTheCreditsWaitInTheSendersMemory) {
  test::run_group(2, GetParam(), [](Group& group) {
    constexpr int kCount = 400;  // messages of 8 KiB: three times the window
    std::vector<Floats> data;
    std::vector<Work> works;
    if (group.membership().rank == 0) {
      for (int i = 0; i < kCount; ++i) data.push_back(pattern(2048, i));
      for (int i = 0; i < kCount; ++i) works.push_back(group.send(view(data[i]), 1, i, kAsync));
      EXPECT_FALSE(works.back().done());
      expect_done(group.barrier());
    } else {
      expect_done(group.barrier());
      data.assign(kCount, Floats(2048));
      // Receives in reverse order, while the window is full of messages that have no receive yet.
      for (int i = kCount - 1; i >= 0; --i) expect_done(group.receive(view(data[i]), 0, i));
      for (int i = 0; i < kCount; ++i) EXPECT_EQ(data[i], pattern(2048, i)) << i;
    }
    for (const Work& work : works) expect_done(work);
  });
}

TEST_P(Messages, OfAnotherLengthFailAtBothRanksOnly) {
  test::run_group(2, GetParam(), [](Group& group) {
    for (const size_t count : {10u, 100'000u}) {
      Floats data = pattern(count, 0), shorter(count - 1);
      if (group.membership().rank == 0) {
        const Work work = group.send(view(data), 1, 4, kAsync);
        if (count > 10) {
          const Error error = error_of(work);
          EXPECT_EQ(error.code, ErrorCode::kMismatch);
          EXPECT_NE(error.message.find("400000 bytes, rank 1 receives 399996"), std::string::npos) << error.message;
        }
      } else {
        const Error error = error_of(group.receive(view(shorter), 0, 4));
        EXPECT_EQ(error.code, ErrorCode::kMismatch);
        EXPECT_EQ(error.rank, 0);
        const std::string both = "sent " + std::to_string(4 * count) + " bytes with tag 4, the receive takes " +
                                 std::to_string(4 * count - 4);
        EXPECT_NE(error.message.find(both), std::string::npos) << error.message;
      }
    }
    Floats data = pattern(10, 1), in(10);
    expect_done(group.membership().rank == 0 ? group.send(view(data), 1, 0) : group.receive(view(in), 0, 0));
  });
}

TEST_P(Messages, OfAnotherDtypeFailAtBothRanksOnly) {
  test::run_group(2, GetParam(), [](Group& group) {
    for (const size_t count : {10u, 100'000u}) {
      Floats data = pattern(count, 0);
      std::vector<int32_t> other(count, 7);
      if (group.membership().rank == 0) {
        const Work work = group.send(view(data), 1, 4, kAsync);
        if (count > 10) {
          const Error error = error_of(work);
          EXPECT_EQ(error.code, ErrorCode::kMismatch);
          EXPECT_EQ(error.rank, 1);
          EXPECT_NE(error.message.find("is float32, rank 1 receives int32 with tag 4"), std::string::npos)
              << error.message;
        }
      } else {
        const Error error = error_of(group.receive({other.data(), count, Dtype::kInt32}, 0, 4));
        EXPECT_EQ(error.code, ErrorCode::kMismatch);
        EXPECT_EQ(error.rank, 0);
        EXPECT_NE(error.message.find("rank 0 sent float32 with tag 4, the receive takes int32"), std::string::npos)
            << error.message;
        EXPECT_EQ(other, std::vector<int32_t>(count, 7));
      }
    }
    Floats data = pattern(10, 1), in(10);
    expect_done(group.membership().rank == 0 ? group.send(view(data), 1, 0) : group.receive(view(in), 0, 0));
  });
}

TEST_P(Messages, ThatNeverArriveTimeOutOnlyTheReceive) {
  test::run_group(2, GetParam(), [](Group& group) {
    Floats data(4), in(4);
    if (group.membership().rank == 1) {
      for (const bool async : {false, true}) {
        const Error error = error_of(group.receive(view(in), 0, 77, {.timeout = 50ms, .async = async}));
        EXPECT_EQ(error.code, ErrorCode::kTimeout);
        EXPECT_EQ(error.rank, 0);
        EXPECT_NE(error.to_string().find("timed out waiting for a message from rank 0"), std::string::npos);
        EXPECT_NE(error.to_string().find("tag 77"), std::string::npos);
      }
      EXPECT_EQ(error_of(group.receive(view(in), kAnyRank, 77, {.timeout = 50ms})).code, ErrorCode::kTimeout);
    }
    expect_done(group.barrier());
    expect_done(group.membership().rank == 0 ? group.send(view(data), 1, 77) : group.receive(view(in), 0, 77));
  });
}

TEST_P(Messages, ThatAreNeverReceivedFailTheGroup) {
  test::run_group(2, GetParam(), [](Group& group) {
    if (group.membership().rank == 1) {
      while (group.barrier().result()) {
      }
      return;
    }
    Floats data(1 << 20);
    const Error error = error_of(group.send(view(data), 1, 6, {.timeout = 100ms}));
    EXPECT_EQ(error.code, ErrorCode::kTimeout);
    EXPECT_EQ(error.rank, 1);
    EXPECT_NE(error.message.find("did not receive it in time (tag 6)"), std::string::npos) << error.message;
    EXPECT_FALSE(group.status());
  });
}

TEST_P(Messages, WithoutAPossiblePeerAreRefused) {
  test::run_group(2, GetParam(), [](Group& group) {
    Floats data(4);
    const Rank self = group.membership().rank;
    EXPECT_EQ(error_of(group.send(view(data), self, 0)).code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(error_of(group.receive(view(data), self, 0)).code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(error_of(group.send(view(data), 2, 0)).code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(error_of(group.send(view(data), kAnyRank, 0)).code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(error_of(group.receive(view(data), -3, 0)).code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(group.status());
  });
}

TEST_P(Messages, EndWithAnAbortHereAndAtThePeer) {
  std::latch begun(2);  // an abort also ends messages that are on their way
  test::run_group(2, GetParam(), [&begun](Group& group) {
    const Rank peer = 1 - group.membership().rank;
    Floats data(4);
    expect_done(group.send(view(data), peer, 0));
    expect_done(group.receive(view(data), peer, 0));
    const Work pending = group.receive(view(data), peer, 1, kAsync);
    begun.arrive_and_wait();
    if (peer == 1) group.abort(Error{ErrorCode::kAborted, "the user has had enough", 0, {}});
    const Error error = error_of(pending);
    EXPECT_NE(error.message.find("the user has had enough"), std::string::npos) << error.to_string();
    EXPECT_FALSE(group.send(view(data), peer, 0).wait());
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, Messages, testing::Values("shm", "unix", "tcp", "striped"),
                         [](const auto& info) { return std::string(info.param); });

/// Runs ranks whose groups end at different times.
void run_leaving(const char* transports, const std::function<void(std::unique_ptr<Group>, Rank)>& body, int size = 2) {
  const auto store = memory_store();
  test::run_ranks(size, [&](Rank rank) {
    auto group = Group::form(**store->clone(), {rank, size, "test", 0}, test::options_for(transports));
    ASSERT_TRUE(group) << group.error().to_string();
    body(std::move(*group), rank);
  });
}

class Leaving : public testing::TestWithParam<const char*> {};

TEST_P(Leaving, DeliversAllSentMessages) {
  std::promise<void> gone;
  const auto left = gone.get_future().share();
  run_leaving(GetParam(), [&](std::unique_ptr<Group> group, Rank rank) {
    Floats data = pattern(1000, 1), in(1000);
    if (rank == 0) {
      for (int i = 0; i < 3; ++i) expect_done(group->send(view(data), 1, i));
      group.reset();
      gone.set_value();
    } else {
      // This receive drives the engine, which must accept the sender's link.
      expect_done(group->receive(view(in), 0, 1));
      left.wait();
      expect_done(group->receive(view(in), 0, 2));
      expect_done(group->receive(view(in), 0, 0));
      EXPECT_EQ(in, data);
      const Error error = error_of(group->receive(view(in), 0, 0));
      EXPECT_EQ(error.code, ErrorCode::kLeft) << error.to_string();
      EXPECT_EQ(error.rank, 0);
      EXPECT_EQ(error_of(group->send(view(data), 0, 0)).rank, 0);
    }
  });
}

TEST_P(Leaving, EndsReceivesFromTheRankThatLeft) {
  run_leaving(GetParam(), [&](std::unique_ptr<Group> group, Rank rank) {
    if (rank == 0) return;
    Floats in(10);
    const Error error = error_of(group->receive(view(in), 0, 3));
    EXPECT_EQ(error.rank, 0) << error.to_string();
    EXPECT_NE(error.code, ErrorCode::kTimeout) << error.to_string();
  });
}

TEST(LeavingOne, EndsNoReceiveFromAnyRankWhileOthersStay) {
  std::promise<void> noticed;
  const auto run_rank = [&](std::unique_ptr<Group> group, Rank rank) {
    if (rank == 1) return;
    Floats data = pattern(10, 2), in(10);
    if (rank == 2) {
      noticed.get_future().wait();
      return expect_done(group->send(view(data), 0, 3));
    }
    // Long enough to notice the rank that has left. No other rank sends yet.
    const Error error = error_of(group->receive(view(in), kAnyRank, 3, {.timeout = std::chrono::milliseconds(800)}));
    EXPECT_EQ(error.code, ErrorCode::kTimeout) << error.to_string();
    noticed.set_value();
    expect_done(group->receive(view(in), kAnyRank, 3));
    EXPECT_EQ(in, data);
    EXPECT_EQ(error_of(group->receive(view(in), kAnyRank, 3)).code, ErrorCode::kLeft);
  };
  run_leaving("tcp", run_rank, 3);
}

TEST_P(Leaving, EndsPendingOperationsLocally) {
  run_leaving(GetParam(), [&](std::unique_ptr<Group> group, Rank rank) {
    Floats in(10);
    const Work work = group->receive(view(in), 1 - rank, 3, kAsync);
    group.reset();
    EXPECT_FALSE(work.wait());
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, Leaving, testing::Values("shm", "unix", "tcp", "striped"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace muster
