// Operations that begin while the one before them still runs: their results are those of calls one after the other,
// also where an operation needs what the one before it writes.
#include <string>
#include <tuple>
#include <vector>

#include "group/ranks.h"
#include "muster/base/random.h"

namespace muster {
namespace {

constexpr size_t kElements = 100'000, kMaxCount = 9000;
constexpr int kOperations = 300;

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
                         testing::Combine(testing::Values("unix", "tcp", "striped", "shm"), testing::Values(2, 3, 5)),
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
    EXPECT_FALSE(works.back().wait() && !aborts);
    EXPECT_FALSE(group.status());
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
