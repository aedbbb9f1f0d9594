// Operations that begin while the one before them still runs: when they do, and that their results are those of calls
// one after the other.
#include <latch>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "group/ranks.h"
#include "muster/base/random.h"
#include "muster/group/engine/schedule_pipeline.h"
#include "muster/group/operations.h"

namespace muster {
namespace {

constexpr size_t kElements = 100'000, kMaxCount = 9000;
constexpr int kOperations = 300;

/// Counts its sends, and completes nothing until it ends.
class IdleLink final : public Link {
 public:
  ~IdleLink() override { close(Error{ErrorCode::kAborted, "the test is over", 1, {}}); }
  void send(std::span<const ConstSegment> /*from*/, Completion completion) override {
    ++sends;
    pending_.push_back(std::move(completion));
  }
  void receive(std::span<const Segment> /*into*/, Completion completion) override {
    pending_.push_back(std::move(completion));
  }
  void close(Error why) override {
    for (const Completion& each : std::exchange(pending_, {})) each(tl::unexpected(why));
  }
  void on_close(std::function<void(const Error&)> /*handler*/) override {}
  void ping(std::function<void()> /*pong*/) override {}
  void send_control(ByteView /*bytes*/) override {}
  void set_control_handler(std::function<void(ByteView)> /*handler*/) override {}
  bool is_open() const override { return true; }
  const Peer& peer() const override { return peer_; }
  const char* kind() const override { return "tcp"; }

  int sends = 0;

 private:
  const Peer peer_;
  std::vector<Completion> pending_;
};

/// Of rank 0 of two.
class BeginEarly : public testing::Test {
 protected:
  Operation gather(size_t input, size_t output, Collective collective = Collective::kAllGather) {
    Operation operation;
    operation.call.collective = collective;
    operation.call.sequence = ++sequence_;
    if (collective == Collective::kAllGather) {
      operation.input = {memory_.data() + input, kCount, Dtype::kUint8};
      operation.output = {memory_.data() + output, 2 * kCount, Dtype::kUint8};
    }
    EXPECT_TRUE(validate_and_infer(operation, GroupSpec{0, 2, {}, 0}));
    return operation;
  }
  void run(const Operation& operation) {
    ASSERT_TRUE(pipeline_.runner().plan(operation, 0, 2));
    pipeline_.runner().begin(operation, links_);
  }
  bool begins_after(const Operation& current, const Operation& next) {
    const int before = link_.sends;
    pipeline_.begin_early(next, current, 0, links_);
    return link_.sends > before;
  }

  static constexpr size_t kCount = 1000;
  std::vector<uint8_t> memory_ = std::vector<uint8_t>(10 * kCount);
  uint64_t sequence_ = 0;
  SchedulePipeline pipeline_{Tuning(), "tcp", 1};
  IdleLink link_;
  std::vector<Link*> links_{nullptr, &link_};
};

TEST_F(BeginEarly, IfTheMemoryIsNotTheSame) {
  const Operation current = gather(0, kCount);
  run(current);
  ASSERT_TRUE(pipeline_.has_room());
  EXPECT_FALSE(begins_after(current, gather(2 * kCount, 4 * kCount))) << "reads what the current one writes";
  EXPECT_FALSE(begins_after(current, gather(4 * kCount, 2 * kCount))) << "writes what the current one writes";
  EXPECT_FALSE(begins_after(current, gather(5 * kCount, 0))) << "writes what the current one reads";
  EXPECT_FALSE(begins_after(current, gather(0, 0, Collective::kBarrier)));
  const Operation refused = gather(4 * kCount, 2 * kCount), next = gather(0, 3 * kCount);
  EXPECT_FALSE(begins_after(current, refused));
  EXPECT_TRUE(begins_after(current, next)) << "reads what the current one reads";
  EXPECT_FALSE(pipeline_.has_room()) << "one begins early, not more";
  EXPECT_FALSE(pipeline_.resume(refused));
  EXPECT_TRUE(pipeline_.resume(next));
  EXPECT_TRUE(pipeline_.has_room());
}

TEST_F(BeginEarly, NotAfterABarrier) {
  const Operation current = gather(0, 0, Collective::kBarrier);
  run(current);
  EXPECT_FALSE(begins_after(current, gather(0, kCount)));
}

/// Calls that read and write random parts of one block of memory. Equal seeds give equal calls.
class RandomCalls {
 public:
  RandomCalls(Group& group, uint64_t seed) : group_(group), random_(seed), memory_(kElements) {
    for (size_t i = 0; i < kElements; ++i) memory_[i] = static_cast<uint32_t>(i * 31 + group.membership().rank);
  }

  std::vector<Work> make(bool async) {
    std::vector<Work> works;
    for (int i = 0; i < kOperations; ++i) works.push_back(call({.async = async}));
    return works;
  }
  const std::vector<uint32_t>& memory() const { return memory_; }

 private:
  Work call(const CallOptions& options) {
    const auto size = static_cast<size_t>(group_.membership().size);
    const size_t count = draw(2) == 0 ? 1 + draw(20) : 1 + draw(kMaxCount);
    const size_t place = draw(kElements - count);
    const auto root = static_cast<Rank>(draw(size));
    // One block lies before or after `size` others.
    const bool first = draw(2) == 0;
    const size_t begin = draw(kElements - count * (size + 1));
    const BufferView one = part(first ? begin : begin + count * size, count);
    const BufferView all = part(first ? begin + count : begin, count * size);
    switch (draw(7)) {
      case 0:
        return group_.all_reduce(part(place, count), ReduceOp::kSum, options);
      case 1:
        return group_.broadcast(part(place, count), root, options);
      case 2:
        return group_.all_gather(one, all, options);
      case 3:
        return group_.reduce_scatter(all, one, ReduceOp::kMax, options);
      case 4:
        return group_.reduce(part(place, count), ReduceOp::kBitXor, root, options);
      case 5:
        return group_.gather(one, all, root, options);
      default:
        return draw(4) == 0 ? group_.barrier(options) : group_.scatter(all, one, root, options);
    }
  }
  size_t draw(size_t limit) { return random_.below(limit); }
  BufferView part(size_t offset, size_t count) { return {memory_.data() + offset, count, Dtype::kUint32}; }

  Group& group_;
  Random random_;
  std::vector<uint32_t> memory_;
};

class Pipeline : public testing::TestWithParam<std::tuple<std::string, int>> {};
INSTANTIATE_TEST_SUITE_P(Transports, Pipeline,
                         testing::Combine(testing::Values("unix", "tcp", "striped"), testing::Values(2, 3)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + std::to_string(std::get<1>(info.param));
                         });

TEST_P(Pipeline, OperationsGiveTheResultsOfTheirOrder) {
  const auto [transports, size] = GetParam();
  test::run_group(size, transports, [](Group& group) {
    for (const uint64_t seed : {1, 2}) {
      RandomCalls queued(group, seed), one_by_one(group, seed);
      for (const Work& work : queued.make(true)) ASSERT_TRUE(work.wait()) << work.wait().error().to_string();
      for (const Work& work : one_by_one.make(false)) ASSERT_TRUE(work.wait()) << work.wait().error().to_string();
      EXPECT_EQ(queued.memory(), one_by_one.memory()) << "seed " << seed;
    }
  });
}

/// Half of the ranks begin one after the other.
TEST_P(Pipeline, OtherRanksNeedNotDoTheSame) {
  const auto [transports, size] = GetParam();
  test::run_group(size, transports, [](Group& group) {
    RandomCalls calls(group, 3), one_by_one(group, 3);
    for (const Work& work : calls.make(group.membership().rank % 2 == 0)) ASSERT_TRUE(work.wait());
    for (const Work& work : one_by_one.make(false)) ASSERT_TRUE(work.wait());
    EXPECT_EQ(calls.memory(), one_by_one.memory());
  });
}

TEST_P(Pipeline, AnAbortEndsAllOperations) {
  const auto [transports, size] = GetParam();
  test::run_group(size, transports, [](Group& group) {
    std::vector<std::vector<uint8_t>> data(20, std::vector<uint8_t>(1 << 20));
    std::vector<Work> works;
    const bool aborts = group.membership().rank == group.membership().size - 1;
    for (size_t i = 0; i < (aborts ? 3 : data.size()); ++i) {
      works.push_back(
          group.all_reduce({data[i].data(), data[i].size(), Dtype::kUint8}, ReduceOp::kSum, {.async = true}));
    }
    if (aborts) {
      (void)works[1].wait();
      group.abort(Error{ErrorCode::kAborted, "the operator requested it", group.membership().rank, {}});
    }
    for (const Work& work : works) (void)work.wait();
    EXPECT_FALSE(group.status());
    if (aborts) return;
    const auto last = works.back().wait();
    ASSERT_FALSE(last);
    EXPECT_NE(last.error().to_string().find("the operator requested it"), std::string::npos)
        << last.error().to_string();
  });
}

/// Rank 0 has nothing more to do in the first operation when it aborts the group. Rank 1 waits for rank 2.
TEST(PipelineOfThree, AnAbortReachesARankThatWaitsForAnother) {
  std::latch failed(2);
  test::run_group(3, "tcp", [&](Group& group) {
    const Rank rank = group.membership().rank;
    if (rank == 2) return failed.wait();
    std::vector<uint8_t> first(3 << 20), received(first.size()), second(4 << 20);
    std::vector<Work> works;
    works.push_back(group.all_to_all({first.data(), first.size(), Dtype::kUint8},
                                     {received.data(), received.size(), Dtype::kUint8}, {.async = true}));
    if (rank == 0) {
      works.push_back(group.all_reduce({second.data(), second.size(), Dtype::kUint8}, ReduceOp::kSum, {.async = true}));
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // tidy: allow(sleep) until all transfers have begun
      group.abort(Error{ErrorCode::kAborted, "the operator requested it", 0, {}});
    }
    const auto result = works[0].wait();
    failed.count_down();
    ASSERT_FALSE(result);
    EXPECT_NE(result.error().to_string().find("the operator requested it"), std::string::npos)
        << result.error().to_string();
  });
}

TEST_P(Pipeline, AMismatchIsFoundInAnOperationThatBeganEarly) {
  const auto [transports, size] = GetParam();
  test::run_group(size, transports, [](Group& group) {
    std::vector<uint8_t> first(1 << 20), second(1 << 20);
    const Work before = group.all_reduce({first.data(), first.size(), Dtype::kUint8}, ReduceOp::kSum, {.async = true});
    const size_t count = group.membership().rank == 0 ? second.size() : second.size() / 2;
    const Work differs = group.all_reduce({second.data(), count, Dtype::kUint8}, ReduceOp::kSum, {.async = true});
    (void)before.wait();
    const auto result = differs.wait();
    ASSERT_FALSE(result);
    EXPECT_NE(result.error().code, ErrorCode::kTimeout) << result.error().to_string();
  });
}

}  // namespace
}  // namespace muster
