// Ranks that make different calls without MUSTER_DEBUG. For any two calls over any transport, every rank must end with
// kMismatch, and no rank may get a result that lacks the deviating rank's bytes. CI runs some pairs of calls over each
// transport; MUSTER_MISMATCHES=all runs every pair.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <latch>
#include <string>
#include <string_view>

#include "group/ranks.h"

namespace muster {
namespace {

using test::options_for;
using test::run_ranks;

constexpr int kRanks = 4;
constexpr Rank kDeviatingRank = 2;
constexpr size_t kBlock = 24;  // elements

/// The memory of a rank, on which it makes its calls.
struct Memory {
  float input[kRanks * kBlock] = {}, output[kRanks * kBlock] = {};
};
using Body = std::function<Work(Group&, Memory&, const CallOptions&)>;

struct Kind {
  const char* name;
  bool takes_all;  ///< rank 0 needs every rank's bytes, so it cannot succeed
  Body body;
  bool ends_well = false;  ///< rank 0 may succeed if the other ranks call uneven_all_to_all
};

BufferView floats(float* data, size_t count) { return {data, count, Dtype::kFloat32}; }
BufferView at_root(Group& group, Rank root, float* data) {
  return floats(data, group.membership().rank == root ? kRanks * kBlock : 0);
}

Body all_reduce(size_t count, ReduceOp op, Dtype dtype = Dtype::kFloat32) {
  return [=](Group& group, Memory& memory, const CallOptions& options) {
    return group.all_reduce({memory.input, count, dtype}, op, options);
  };
}
Body broadcast(Rank root) {
  return [=](Group& group, Memory& memory, const CallOptions& options) {
    return group.broadcast(floats(memory.input, kBlock), root, options);
  };
}
Body reduce(Rank root) {
  return [=](Group& group, Memory& memory, const CallOptions& options) {
    return group.reduce(floats(memory.input, kBlock), ReduceOp::kSum, root, options);
  };
}
Body gather(Rank root) {
  return [=](Group& group, Memory& memory, const CallOptions& options) {
    return group.gather(floats(memory.input, kBlock), at_root(group, root, memory.output), root, options);
  };
}
Body scatter(Rank root) {
  return [=](Group& group, Memory& memory, const CallOptions& options) {
    return group.scatter(at_root(group, root, memory.input), floats(memory.output, kBlock), root, options);
  };
}

/// An all_to_all with 6 elements for each rank, except for the given counts for rank 0.
Body exchange(size_t sent, size_t received) {
  return [=](Group& group, Memory& memory, const CallOptions& options) {
    std::vector<size_t> to(kRanks, 6), from(kRanks, 6);
    to[0] = sent;
    from[0] = received;
    return group.all_to_all(floats(memory.input, 18 + sent), floats(memory.output, 18 + received), options, to, from);
  };
}

const Kind kKinds[] = {
    {"all_reduce", true, all_reduce(kBlock, ReduceOp::kSum)},
    {"broadcast", false, broadcast(0)},
    {"reduce", true, reduce(0)},
    {"gather", true, gather(0)},
    {"scatter", false, scatter(0)},
    {"barrier", true, [](Group& group, Memory&, const CallOptions& options) { return group.barrier(options); }},
    {"all_gather", true,
     [](Group& group, Memory& memory, const CallOptions& options) {
       return group.all_gather(floats(memory.input, kBlock), floats(memory.output, kRanks * kBlock), options);
     }},
    {"reduce_scatter", true,
     [](Group& group, Memory& memory, const CallOptions& options) {
       return group.reduce_scatter(floats(memory.input, kRanks * kBlock), floats(memory.output, kBlock), ReduceOp::kSum,
                                   options);
     }},
    {"all_to_all", true,
     [](Group& group, Memory& memory, const CallOptions& options) {
       return group.all_to_all(floats(memory.input, kRanks * kBlock), floats(memory.output, kRanks * kBlock), options);
     }},
    {"uneven_all_to_all", true, exchange(6, 6)},
    // The calls below are only used for the deviating rank.
    {"shape", true, all_reduce(kBlock - 1, ReduceOp::kSum)},
    {"dtype", true, all_reduce(kBlock, ReduceOp::kSum, Dtype::kInt32)},
    {"op", true, all_reduce(kBlock, ReduceOp::kMax)},
    {"broadcast_from_1", false, broadcast(1)},
    {"broadcast_from_2", false, broadcast(2)},
    {"reduce_to_2", true, reduce(2)},
    {"gather_to_2", true, gather(2)},
    {"scatter_from_2", false, scatter(2)},
    {"sends_more", true, exchange(14, 6)},
    {"sends_less", true, exchange(5, 6)},
    {"expects_more", true, exchange(6, 7), true},
    {"expects_less", true, exchange(6, 1), true},
};
constexpr size_t kUsualKinds = 10;  // the first kUsualKinds kinds are also called by the majority

/// The destructor waits until all threads have reached it.
class WaitForAll {
 public:
  explicit WaitForAll(std::latch& latch) : latch_(latch) {}
  ~WaitForAll() { latch_.arrive_and_wait(); }

 private:
  std::latch& latch_;
};

struct Pair {
  const char* transport;
  const Kind* usual;
  const Kind* deviating;
};

void expect_mismatch(const Pair& pair) {
  const auto [transport, usual, deviating] = pair;
  const bool hosts = std::string(transport) == "hosts";
  const auto store = memory_store();
  std::latch begun(kRanks), over(kRanks);
  run_ranks(kRanks, [&, usual = usual, deviating = deviating, transport = transport](Rank rank) {
    auto options = options_for(hosts ? "shm,tcp" : transport);
    if (hosts) options.host_label = std::to_string(rank / 2);
    Result<std::unique_ptr<Group>> group;
    const WaitForAll end(over);  // no rank leaves before all ranks are done
    group = Group::form(*store, {rank, kRanks, "test", 0}, options);
    const auto first_barrier = group ? (*group)->barrier().result() : Result<>{};
    begun.arrive_and_wait();  // otherwise the first rank that fails could end the barrier of another rank
    ASSERT_TRUE(group) << group.error().to_string();
    ASSERT_TRUE(first_barrier) << first_barrier.error().to_string();
    Memory memory;
    const CallOptions call{.timeout = std::chrono::seconds(40)};
    auto result = (rank == kDeviatingRank ? deviating : usual)->body(**group, memory, call).result();
    const bool good =
        !usual->takes_all || (deviating->ends_well && usual->name == std::string_view("uneven_all_to_all"));
    EXPECT_FALSE(rank == 0 && result && !good) << "a result without rank " << kDeviatingRank;
    // A rank that only sends may finish before the mismatch is found. All ranks may even reach the next call, where
    // some of them find it.
    for (int next = 0; next < 2 && result; ++next) result = (*group)->barrier(call).result();
    ASSERT_FALSE(result) << "rank " << rank;
    EXPECT_EQ(result.error().code, ErrorCode::kMismatch) << "rank " << rank << ": " << result.error().to_string();
  });
}

class Mismatch : public testing::TestWithParam<Pair> {};

TEST_P(Mismatch, EndsBothCallsAtEveryRank) { expect_mismatch(GetParam()); }

const Kind* kind(std::string_view name) {
  return std::find_if(std::begin(kKinds), std::end(kKinds), [&](const Kind& each) { return each.name == name; });
}

/// Simulates ranks on different hosts: they cannot read each other's flight recorders, so they send their calls to each
/// other.
TEST(MismatchOutOfSight, EndsRanksThatWaitForEachOther) {
  setenv("MUSTER_RECORDER", "0", 1);
  expect_mismatch({"tcp", kind("broadcast_from_2"), kind("broadcast")});
  unsetenv("MUSTER_RECORDER");
}

std::string name_of(const testing::TestParamInfo<Pair>& info) {
  return std::string(info.param.transport) + "_" + info.param.usual->name + "_" + info.param.deviating->name;
}

/// In these pairs no data meets that would reveal the mismatch.
INSTANTIATE_TEST_SUITE_P(RootsThatWaitForEachOther, Mismatch,
                         testing::Values(Pair{"shm", kind("gather"), kind("gather_to_2")},
                                         Pair{"shm", kind("broadcast_from_2"), kind("broadcast")},
                                         Pair{"hosts", kind("broadcast_from_2"), kind("broadcast")}),
                         name_of);

std::vector<Pair> pairs() {
  const char* kTransports[] = {"shm", "unix", "tcp", "hosts"};
  const char* chosen = std::getenv("MUSTER_MISMATCHES");
  const bool all = chosen != nullptr && std::string(chosen) == "all";
  std::vector<Pair> list;
  size_t number = 0;
  for (size_t usual = 0; usual < kUsualKinds; ++usual) {
    for (size_t deviating = 0; deviating < std::size(kKinds); ++deviating) {
      if (usual == deviating) continue;
      for (size_t i = 0; i < std::size(kTransports); ++i) {
        if (all || number++ % 37 == 0) list.push_back({kTransports[i], &kKinds[usual], &kKinds[deviating]});
      }
    }
  }
  return list;
}

INSTANTIATE_TEST_SUITE_P(Pairs, Mismatch, testing::ValuesIn(pairs()), name_of);

}  // namespace
}  // namespace muster
