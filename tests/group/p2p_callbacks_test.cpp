// Callbacks of messages when their group fails: they may call collectives, which then fail as well.
#include <future>
#include <latch>

#include "group/ranks.h"

namespace muster {
namespace {

/// Much shorter than the timeouts of the calls, and much longer than the calls need.
Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

/// Rank 0 of two. It has a receive that gets no message, and whose callback calls a collective.
class MessageCallbacks : public testing::TestWithParam<const char*> {
 protected:
  void run(const std::function<void(Group&)>& fail_the_group) {
    const auto store = memory_store();
    std::latch over(1);
    test::run_ranks(2, [&](Rank rank) {
      const auto group = Group::form(*store, {rank, 2, "callbacks", 0}, test::options_for(GetParam()));
      ASSERT_TRUE(group) << group.error().to_string();
      if (rank == 1) return over.wait();
      std::promise<Result<>> collective;
      float word = 0;
      const Work message = (*group)->receive({&word, 1, Dtype::kFloat32}, 1, 0, {.async = true});
      message.on_done([&, owner = group->get()](const Result<>& result) {
        EXPECT_FALSE(result);
        collective.set_value(owner->barrier({.async = true}).wait(soon()));
      });
      fail_the_group(**group);
      const auto result = collective.get_future().get();
      ASSERT_FALSE(result);
      EXPECT_NE(result.error().message, "the operation is still pending");
      over.count_down();
    });
  }
};

TEST_P(MessageCallbacks, MayCallWhereASynchronousCollectiveFails) {
  run([](Group& group) { EXPECT_FALSE(group.barrier({.timeout = 50ms}).wait()); });
}

TEST_P(MessageCallbacks, MayCallWhereAQueuedCollectiveFails) {
  run([](Group& group) { EXPECT_FALSE(group.barrier({.timeout = 50ms, .async = true}).wait()); });
}

TEST_P(MessageCallbacks, MayCallInAnAbortThatEndsACollective) {
  run([](Group& group) {
    const Work under_way = group.barrier({.async = true});
    group.abort({ErrorCode::kAborted, "the user has had enough", 0, {}});
    EXPECT_FALSE(under_way.wait());
  });
}

TEST_P(MessageCallbacks, MayCallWhereAMessageFails) {
  run([](Group& group) {
    const Work under_way = group.barrier({.async = true});
    std::vector<float> data(1 << 20);
    EXPECT_FALSE(group.send({data.data(), data.size(), Dtype::kFloat32}, 1, 6, {.timeout = 50ms}).wait());
    EXPECT_FALSE(under_way.wait());
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, MessageCallbacks, testing::Values("shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace muster
