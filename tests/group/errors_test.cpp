// Errors while a group forms or runs: each fault gives its own error, at every rank, within the deadline.
#include <atomic>
#include <cstdlib>
#include <latch>

#include "group/ranks.h"

namespace muster {
namespace {

using test::options_for;
using test::run_group;
using test::run_ranks;

Error form_error(Store& store, const GroupSpec& membership, const GroupOptions& options) {
  const auto group = Group::form(store, membership, options);
  EXPECT_FALSE(group);
  return group ? Error{} : group.error();
}

TEST(GroupForm, NamesMissingRanks) {
  const auto store = memory_store();
  const auto expect_missing = [&](Rank rank, Rank first, const std::string& all) {
    const auto error = form_error(*store, {rank, 4, "test", 0}, options_for("shm", std::chrono::milliseconds(100)));
    EXPECT_EQ(error.code, ErrorCode::kTimeout);
    EXPECT_EQ(error.rank, first);
    EXPECT_NE(error.message.find("missing: " + all), std::string::npos) << error.to_string();
  };
  expect_missing(0, 1, "1, 2, 3");
  expect_missing(1, 0, "0, 2, 3");  // rank 0 did come, although it does not wait any more
}

TEST(GroupForm, FormsAgainUnderAUsedName) {
  const auto store = memory_store();
  for (const int size : {2, 3, 1, 20, 2, 3}) {
    run_ranks(size, [&](Rank rank) {
      const auto group = Group::form(*store, {rank, size, "test", 0}, options_for("shm"));
      ASSERT_TRUE(group) << group.error().to_string();
      EXPECT_TRUE((*group)->barrier().result());
    });
  }
}

TEST(GroupForm, AllowsRanksToFormTheNextGroupEarly) {
  const auto store = memory_store();
  run_ranks(3, [&](Rank rank) {
    for (int i = 0; i < 10; ++i) {
      const auto group = Group::form(*store, {rank, 3, "test", 0}, options_for("shm"));
      ASSERT_TRUE(group) << group.error().to_string();
      EXPECT_EQ((*group)->membership().name, i == 0 ? "test" : "test#" + std::to_string(i + 1));
    }
  });
}

TEST(GroupForm, FormsWithRanksThatRetryAfterATimeout) {
  for (const int size : {3, 20}) {  // small and large groups exchange their members in different ways
    const auto store = memory_store();
    for (const Rank rank : {0, 1, 0}) {
      const auto error = form_error(*store, {rank, size, "test", 0}, options_for("shm", std::chrono::milliseconds(50)));
      EXPECT_EQ(error.code, ErrorCode::kTimeout) << error.to_string();
    }
    run_ranks(size, [&](Rank rank) {
      const auto group = Group::form(*store, {rank, size, "test", 0}, options_for("shm"));
      ASSERT_TRUE(group) << group.error().to_string();
      EXPECT_TRUE((*group)->barrier().result());
    });
  }
}

TEST(GroupForm, FormsAfterASizeWasCorrected) {
  const auto store = memory_store();
  run_ranks(2, [&](Rank rank) {
    const auto error = form_error(*store, {rank, 2 + rank, "test", 0}, options_for("shm"));
    EXPECT_EQ(error.code, ErrorCode::kMismatch) << error.to_string();
    const auto group = Group::form(*store, {rank, 2, "test", 0}, options_for("shm"));
    ASSERT_TRUE(group) << group.error().to_string();
  });
}

TEST(GroupForm, RefusesARankThatIsTakenTwice) {
  const auto store = memory_store();
  auto options = options_for("tcp");
  options.credentials.secret = {1, 2, 3};  // without a job secret, rank 1 would wait for rank 0's record first
  std::atomic<int> refused = 0;
  run_ranks(2, [&](Rank) {
    const auto group = Group::form(*store, {1, 3, "test", 0}, options);
    if (group) return;
    ++refused;
    EXPECT_EQ(group.error().code, ErrorCode::kAlreadyExists);
    EXPECT_EQ(group.error().rank, 1);
    const std::string text = group.error().to_string();
    EXPECT_NE(text.find("rank 1 is taken by rank 1 (host "), std::string::npos) << text;
    // This rank releases the other one.
    run_ranks(2, [&](Rank rank) {
      const auto rest = Group::form(*store, {2 * rank, 3, "test", 0}, options);
      EXPECT_TRUE(rest) << rest.error().to_string();
    });
  });
  EXPECT_EQ(refused, 1);
}

TEST(GroupForm, NamesTheHolderOfADuplicateRank) {
  const auto store = memory_store();
  run_ranks(2, [&](Rank rank) { EXPECT_TRUE(Group::form(*store, {rank, 2, "test", 0}, options_for("shm"))); });
  const auto error = form_error(*store, {1, 2, "test", 0}, options_for("shm", std::chrono::milliseconds(100)));
  EXPECT_EQ(error.code, ErrorCode::kTimeout);
  EXPECT_NE(error.message.find("rank 1 is taken by rank 1 (host "), std::string::npos) << error.to_string();
}

TEST(GroupForm, RefusesARankTwiceWithAJobSecretToo) {
  const auto store = memory_store();
  auto options = options_for("tcp");
  options.credentials.secret = {1, 2, 3};
  std::atomic<int> refused = 0;
  run_ranks(2, [&](Rank) {
    const auto group = Group::form(*store, {0, 2, "test", 0}, options);
    if (group) return;
    EXPECT_EQ(group.error().code, ErrorCode::kAlreadyExists);
    ++refused;
    const auto other = Group::form(*store, {1, 2, "test", 0}, options);  // releases the process that has rank 0
    EXPECT_TRUE(other) << other.error().to_string();
  });
  EXPECT_EQ(refused, 1);
}

TEST(GroupForm, RefusesSizesThatDisagreeAtOnce) {
  const auto store = memory_store();
  run_ranks(2, [&](Rank rank) {
    const auto error = form_error(*store, {rank, 2 + rank, "test", 0}, options_for("shm", std::chrono::seconds(60)));
    EXPECT_EQ(error.code, ErrorCode::kMismatch);
    EXPECT_NE(error.message.find("world size"), std::string::npos) << error.to_string();
  });
}

TEST(GroupForm, RefusesARankOutsideTheGroup) {
  const auto store = memory_store();
  EXPECT_EQ(form_error(*store, {2, 2, "test", 0}, options_for("shm")).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(form_error(*store, {-1, 2, "test", 0}, options_for("shm")).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(form_error(*store, {0, 0, "test", 0}, options_for("shm")).code, ErrorCode::kInvalidArgument);
}

TEST(GroupForm, RefusesAnUnknownTransportAndInterface) {
  const auto store = memory_store();
  EXPECT_EQ(form_error(*store, {0, 1, "a", 0}, options_for("rdma")).code, ErrorCode::kInvalidArgument);
  run_ranks(2, [&](Rank rank) {
    auto options = options_for("tcp");
    options.interface = "nosuch0";
    const auto error = form_error(*store, {rank, 2, "b", 0}, options);
    EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
    EXPECT_NE(error.message.find("nosuch0"), std::string::npos) << error.to_string();
  });
}

TEST(GroupForm, RefusesARankWithAnotherSecret) {
  const auto store = memory_store();
  run_ranks(2, [&](Rank rank) {
    auto options = options_for("tcp", std::chrono::seconds(3));
    options.credentials.secret = {1, 2, 3, static_cast<uint8_t>(rank)};
    const auto error = form_error(*store, {rank, 2, "test", 0}, options);
    // The dialing rank is refused. The listening rank keeps waiting, because the refused connection may have come from
    // an unrelated process.
    EXPECT_EQ(error.code, rank == 1 ? ErrorCode::kAuthentication : ErrorCode::kTimeout) << error.to_string();
    EXPECT_EQ(error.rank, 1 - rank) << error.to_string();
    EXPECT_NE(error.message.find("secret"), std::string::npos) << error.to_string();
  });
}

TEST(GroupForm, RefusesAWeakSecretOfTheEnvironment) {
  ::setenv("MUSTER_SECRET", "abcd", 1);
  const auto options = group_options_from_environment();
  ::unsetenv("MUSTER_SECRET");
  ASSERT_FALSE(options);
  EXPECT_EQ(options.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(options.error().message.find("MUSTER_SECRET: a secret of 2 bytes"), 0U) << options.error().to_string();
}

TEST(GroupForm, SeparatesGenerations) {
  const auto store = memory_store();
  const auto dead = form_error(*store, {1, 2, "test", 0}, options_for("shm", std::chrono::milliseconds(200)));
  EXPECT_EQ(dead.code, ErrorCode::kTimeout);
  run_ranks(2, [&](Rank rank) {
    const auto group = Group::form(*store, {rank, 2, "test", 1}, options_for("shm"));
    ASSERT_TRUE(group) << group.error().to_string();
    EXPECT_TRUE((*group)->barrier().result());
  });
}

class GroupErrors : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Transports, GroupErrors, testing::Values("shm", "unix", "tcp"));

TEST_P(GroupErrors, TimeoutNamesTheMissingRank) {
  const auto store = memory_store();
  std::latch formed(3), given_up(2);  // rank 0 waits until the others have given up
  run_ranks(3, [&](Rank rank) {
    const auto group = Group::form(*store, {rank, 3, "test", 0}, options_for(GetParam()));
    ASSERT_TRUE(group) << group.error().to_string();
    formed.arrive_and_wait();
    // Rank 1 or 2 may be late as well, but the error must name rank 0, the first missing rank.
    if (rank == 0) return given_up.wait();
    const auto result = (*group)->barrier({.timeout = std::chrono::milliseconds(400)}).result();
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kTimeout) << result.error().to_string();
    EXPECT_EQ(result.error().rank, 0) << result.error().to_string();
    EXPECT_NE(result.error().context.find("barrier #1"), std::string::npos) << result.error().to_string();
    // The group has failed, and later calls return the same error.
    const auto next = (*group)->barrier().result();
    ASSERT_FALSE(next);
    EXPECT_EQ(next.error().rank, 0);
    EXPECT_FALSE((*group)->status());
    given_up.count_down();
  });
}

TEST_P(GroupErrors, NamesAPeerThatLeftToRanksThatNeedIt) {
  const auto store = memory_store();
  run_ranks(2, [&](Rank rank) {
    const auto group = Group::form(*store, {rank, 2, "test", 0}, options_for(GetParam()));
    ASSERT_TRUE(group) << group.error().to_string();
    ASSERT_TRUE((*group)->barrier().result());
    if (rank == 1) return;
    const auto result = (*group)->barrier().result();
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kLeft) << result.error().to_string();
    EXPECT_EQ(result.error().rank, 1);
  });
}

TEST_P(GroupErrors, AbortEndsAllWaitsAtAllRanks) {
  const auto store = memory_store();
  std::latch formed(3);  // an abort also ends the forming of ranks that are not done with it
  run_ranks(3, [&](Rank rank) {
    const auto group = Group::form(*store, {rank, 3, "test", 0}, options_for(GetParam()));
    ASSERT_TRUE(group) << group.error().to_string();
    formed.arrive_and_wait();
    if (rank == 2) {
      (*group)->abort(Error{ErrorCode::kAborted, "the operator requested it", 2, {}});
      EXPECT_FALSE((*group)->barrier().result());
      return;
    }
    const Work work = (*group)->barrier({.async = true});
    const auto result = work.wait();
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kAborted) << result.error().to_string();
    EXPECT_NE(result.error().message.find("the operator requested it"), std::string::npos);
  });
}

TEST_P(GroupErrors, AbortFromAnotherThreadEndsTheCallUnderWay) {
  const auto store = memory_store();
  std::latch formed(2), done(1);
  run_ranks(2, [&](Rank rank) {
    const auto group = Group::form(*store, {rank, 2, "test", 0}, options_for(GetParam()));
    ASSERT_TRUE(group) << group.error().to_string();
    formed.arrive_and_wait();
    if (rank == 1) {
      done.wait();
      return;
    }
    std::thread aborter([&] { (*group)->abort(Error{ErrorCode::kAborted, "enough", 0, {}}); });
    EXPECT_FALSE((*group)->barrier().result());
    aborter.join();
    done.count_down();
  });
}

TEST_P(GroupErrors, AMismatchNamesTheRankAndBothCalls) {
  const auto store = memory_store();
  run_ranks(2, [&](Rank rank) {
    const auto group = Group::form(*store, {rank, 2, "test", 0}, options_for(GetParam()));
    ASSERT_TRUE(group) << group.error().to_string();
    std::vector<float> data(10 + rank);
    const auto result = (*group)->all_reduce({data.data(), data.size(), Dtype::kFloat32}, ReduceOp::kSum).result();
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kMismatch);
    const std::string text = result.error().to_string();
    EXPECT_NE(text.find("float32[10]"), std::string::npos) << text;
    EXPECT_NE(text.find("float32[11]"), std::string::npos) << text;
  });
}

TEST(GroupErrorsHosts, MismatchEndsTheCallAtAllRanks) {
  for (const Rank deviating : {1, 2}) {
    const auto store = memory_store();
    std::latch formed(4);  // a failure also ends the forming of ranks that are not done with it
    run_ranks(4, [&](Rank rank) {
      auto options = options_for("shm,tcp");
      options.host_label = rank < 2 ? "a" : "b";
      const auto group = Group::form(*store, {rank, 4, "test", 0}, options);
      ASSERT_TRUE(group) << group.error().to_string();
      formed.arrive_and_wait();
      std::vector<float> data(rank == deviating ? 12 : 10);
      const auto result = (*group)->all_reduce({data.data(), data.size(), Dtype::kFloat32}, ReduceOp::kSum).result();
      ASSERT_FALSE(result) << "rank " << rank;
      EXPECT_EQ(result.error().code, ErrorCode::kMismatch) << result.error().to_string();
    });
  }
}

/// Also a rank that this host's communicator does not have.
TEST(GroupErrorsHosts, AbortMayNameAnyRank) {
  for (const Rank named : {3, 100'000}) {
    const auto store = memory_store();
    std::latch formed(4), over(3);
    run_ranks(4, [&](Rank rank) {
      auto options = options_for("shm,tcp");
      options.host_label = rank < 2 ? "a" : "b";
      const auto group = Group::form(*store, {rank, 4, "test", 0}, options);
      ASSERT_TRUE(group) << group.error().to_string();
      formed.arrive_and_wait();
      if (rank == 0) return over.wait();  // so that rank 1 waits in its host communicator
      const Work work = (*group)->barrier({.async = true});
      if (rank == 1) (*group)->abort(Error{ErrorCode::kTimeout, "the operator waited for too long", named, {}});
      const auto result = work.wait();
      ASSERT_FALSE(result);
      EXPECT_LT(result.error().rank, 4) << result.error().to_string();
      over.count_down();
    });
  }
}

TEST(GroupErrorsHosts, MismatchNamesTheCallsWithoutARecorder) {
  setenv("MUSTER_RECORDER", "0", 1);
  const auto store = memory_store();
  std::latch formed(4);  // a failure also ends the forming of ranks that are not done with it
  run_ranks(4, [&](Rank rank) {
    auto options = options_for("shm,tcp");
    options.host_label = rank < 2 ? "a" : "b";
    const auto group = Group::form(*store, {rank, 4, "test", 0}, options);
    ASSERT_TRUE(group) << group.error().to_string();
    formed.arrive_and_wait();
    std::vector<float> data(rank < 2 ? 12 : 10);
    const auto result = (*group)->all_reduce({data.data(), data.size(), Dtype::kFloat32}, ReduceOp::kSum).result();
    ASSERT_FALSE(result);
    const std::string& text = result.error().message;
    for (const char* call : {"all_reduce #1 (float32[12], sum)", "all_reduce #1 (float32[10], sum)"}) {
      EXPECT_NE(text.find(call), std::string::npos) << text;
    }
    EXPECT_EQ(text.find("reduce_scatter"), std::string::npos) << text;
  });
  unsetenv("MUSTER_RECORDER");
}

TEST(GroupErrorsLocal, BadArgumentsFailAtOnceAndKeepTheGroup) {
  run_group(2, "shm", [](Group& group) {
    float value = 0;
    EXPECT_EQ(group.broadcast({&value, 1, Dtype::kFloat32}, 2).result().error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(group.all_reduce({&value, 1, Dtype::kFloat8E5m2}, ReduceOp::kSum).result().error().code,
              ErrorCode::kUnsupported);
    EXPECT_TRUE(group.status());
    EXPECT_TRUE(group.barrier().result());
  });
}

TEST_P(GroupErrors, LengthsToAndFromItselfMustMatch) {
  run_group(2, GetParam(), [](Group& group) {
    std::vector<float> input(6, 1), output(6);
    const BufferView from{input.data(), 6, Dtype::kFloat32}, to{output.data(), 6, Dtype::kFloat32};
    for (const auto& counts : {std::vector<size_t>{5, 1}, std::vector<size_t>{1, 5}}) {
      const auto result = group.all_to_all(from, to, {}, counts, {3, 3}).result();
      ASSERT_FALSE(result);
      EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
      const Rank rank = group.membership().rank;
      const std::string expected =
          "rank " + std::to_string(rank) + " sends " + std::to_string(counts[rank]) + " elements";
      EXPECT_NE(result.error().message.find(expected), std::string::npos) << result.error().to_string();
    }
    EXPECT_TRUE(group.barrier().result());
  });
}

}  // namespace
}  // namespace muster
