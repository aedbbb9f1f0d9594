// Checks every collective against its plain definition: with equal and unequal blocks, with every root, with memory in
// one segment or several, and in place where that is allowed.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "contract/group_contract.h"
#include "kernels/reduce_reference.h"

namespace muster {

using test::Bfloat16;
using test::Half;

namespace {

constexpr int32_t kGuard = -777;

/// Elements in one segment, or in several segments with guards between them. A collective must not change a guard.
class Memory {
 public:
  Memory(size_t count, bool pieces, int32_t value = -1) {
    for (size_t i = 0; i < count; ++i) {
      // Segments of 1, 2, 3, ... elements.
      if (pieces && i == next_) {
        next_ += ++length_;
        cells_.push_back(kGuard);
      }
      places_.push_back(cells_.size());
      cells_.push_back(value);
    }
    cells_.push_back(kGuard);
  }
  size_t count() const { return places_.size(); }
  int32_t& operator[](size_t index) { return cells_[places_[index]]; }
  BufferView view() { return view(0, count()); }
  BufferView view(size_t offset, size_t count) {
    std::vector<Segment> segments;
    for (size_t i = offset; i < offset + count; ++i) {
      const bool next = i > offset && places_[i] == places_[i - 1] + 1;
      if (!next) segments.push_back({&cells_[places_[i]], 0});
      segments.back().bytes += sizeof(int32_t);
    }
    return BufferView(std::move(segments), Dtype::kInt32);
  }
  bool guards_hold() const {
    return static_cast<size_t>(std::count(cells_.begin(), cells_.end(), kGuard)) == cells_.size() - places_.size();
  }

 private:
  std::vector<int32_t> cells_;
  std::vector<size_t> places_;
  size_t next_ = 0, length_ = 0;
};

/// Element `index` of the block that rank `from` has for rank `to`. It never equals a guard.
int32_t value(Rank from, Rank to, size_t index) { return static_cast<int32_t>(1000 * from + 100 * to + index % 91); }
int32_t sum(int size, Rank to, size_t index) {
  int32_t all = 0;
  for (Rank from = 0; from < size; ++from) all += value(from, to, index);
  return all;
}

/// Calls `body(count, pieces)` for several lengths. Only short lengths are tested with many pieces.
template <class Body>
void for_each_length(Body&& body) {
  for (const size_t count : {0, 1, 13, 700}) {
    body(count, false);
    body(count, true);
  }
  body(50'003, false);
}

/// The lengths of unequal blocks, some of them 0: by rank, or by sender and receiver.
size_t uneven(Rank rank, size_t scale) { return (static_cast<size_t>(rank) * 5 + 3) % 4 * scale; }
size_t uneven(Rank from, Rank to, size_t scale) { return (static_cast<size_t>(from) * 2 + to * 3 + 1) % 4 * scale; }

std::vector<size_t> uneven_counts(int size, size_t scale) {
  std::vector<size_t> counts(size);
  for (Rank rank = 0; rank < size; ++rank) counts[rank] = uneven(rank, scale);
  return counts;
}
size_t total(const std::vector<size_t>& counts) { return std::accumulate(counts.begin(), counts.end(), size_t{0}); }

void expect_done(const Work& work) {
  const auto result = work.result();
  ASSERT_TRUE(result) << result.error().to_string();
}

/// Expects that the average of equal inputs equals the input. Each 16-bit part of each element is `bits` at all ranks.
void expect_average_of_equals(Group& group, Dtype dtype, uint16_t bits) {
  const auto [rank, size] = std::pair(group.membership().rank, group.membership().size);
  const size_t parts = size_of(dtype) / sizeof(bits);
  for (const size_t count : {1, 9'001, 300'007}) {
    const std::vector<uint16_t> input(parts * count * size, bits), average(parts * count, bits);
    std::vector<uint16_t> data = average, block(average.size()), all = input;
    ASSERT_NO_FATAL_FAILURE(expect_done(group.all_reduce({data.data(), count, dtype}, ReduceOp::kAverage)));
    EXPECT_TRUE(data == average) << name(dtype) << "[" << count << "] is " << data[0];
    ASSERT_NO_FATAL_FAILURE(expect_done(
        group.reduce_scatter({all.data(), count * size, dtype}, {block.data(), count, dtype}, ReduceOp::kAverage)));
    EXPECT_TRUE(block == average) << name(dtype) << "[" << count << "] is " << block[0];
    EXPECT_TRUE(all == input);
    data = average;
    ASSERT_NO_FATAL_FAILURE(expect_done(group.reduce({data.data(), count, dtype}, ReduceOp::kAverage, size - 1)));
    EXPECT_TRUE(data == average) << name(dtype) << "[" << count << "] is " << data[0] << " at " << rank;
  }
}

}  // namespace

TEST_P(GroupContract, ReduceGivesTheRootTheSumAndKeepsOtherInputs) {
  run([&](Group& group) {
    const Rank rank = group.membership().rank;
    for (Rank root = 0; root < size(); ++root) {
      for_each_length([&](size_t count, bool pieces) {
        Memory data(count, pieces);
        for (size_t i = 0; i < count; ++i) data[i] = value(rank, 0, i);
        ASSERT_NO_FATAL_FAILURE(expect_done(group.reduce(data.view(), ReduceOp::kSum, root)));
        for (size_t i = 0; i < count; ++i) {
          ASSERT_EQ(data[i], rank == root ? sum(size(), 0, i) : value(rank, 0, i)) << i << " of " << count;
        }
        ASSERT_TRUE(data.guards_hold());
      });
    }
  });
}

TEST_P(GroupContract, GatherBringsEveryBlockToTheRoot) {
  run([&](Group& group) {
    const Rank rank = group.membership().rank;
    for (Rank root = 0; root < size(); ++root) {
      for_each_length([&](size_t count, bool pieces) {
        Memory all(rank == root ? count * size() : 0, pieces), own(count, pieces);
        // At the root, the own block may already be in its place in the output.
        const bool in_place = rank == root && root % 2 == 1;
        for (size_t i = 0; i < count; ++i) (in_place ? all[rank * count + i] : own[i]) = value(rank, 0, i);
        const BufferView input = in_place ? all.view(rank * count, count) : own.view();
        ASSERT_NO_FATAL_FAILURE(expect_done(group.gather(input, all.view(), root)));
        for (size_t i = 0; i < all.count(); ++i) {
          ASSERT_EQ(all[i], value(static_cast<Rank>(i / count), 0, i % count)) << i << " of blocks of " << count;
        }
        ASSERT_TRUE(all.guards_hold());
      });
    }
  });
}

TEST_P(GroupContract, ScatterGivesEveryRankItsBlock) {
  run([&](Group& group) {
    const Rank rank = group.membership().rank;
    for (Rank root = 0; root < size(); ++root) {
      for_each_length([&](size_t count, bool pieces) {
        Memory all(rank == root ? count * size() : 0, pieces), own(count, pieces);
        for (size_t i = 0; i < all.count(); ++i) all[i] = value(root, static_cast<Rank>(i / count), i % count);
        const bool in_place = rank == root && root % 2 == 1;
        const BufferView output = in_place ? all.view(rank * count, count) : own.view();
        ASSERT_NO_FATAL_FAILURE(expect_done(group.scatter(all.view(), output, root)));
        for (size_t i = 0; i < count; ++i) {
          ASSERT_EQ(in_place ? all[rank * count + i] : own[i], value(root, rank, i)) << i << " of " << count;
        }
        ASSERT_TRUE(own.guards_hold() && all.guards_hold());
      });
    }
  });
}

TEST_P(GroupContract, ReduceScatterCombinesTheBlocksForEachRank) {
  run([&](Group& group) {
    const Rank rank = group.membership().rank;
    for_each_length([&](size_t count, bool pieces) {
      for (const bool in_place : {false, true}) {
        Memory all(count * size(), pieces), own(count, pieces);
        for (size_t i = 0; i < all.count(); ++i) all[i] = value(rank, static_cast<Rank>(i / count), i % count);
        const BufferView output = in_place ? all.view(rank * count, count) : own.view();
        ASSERT_NO_FATAL_FAILURE(expect_done(group.reduce_scatter(all.view(), output, ReduceOp::kSum)));
        for (size_t i = 0; i < count; ++i) {
          ASSERT_EQ(in_place ? all[rank * count + i] : own[i], sum(size(), rank, i)) << i << " of " << count;
        }
        ASSERT_TRUE(own.guards_hold() && all.guards_hold());
      }
    });
  });
}

TEST_P(GroupContract, ReduceScatterSupportsUnevenBlocks) {
  run([&](Group& group) {
    const Rank rank = group.membership().rank;
    for (const size_t scale : {1, 17, 9'001}) {
      const auto counts = uneven_counts(size(), scale);
      Memory all(total(counts), scale == 17), own(counts[rank], false);
      size_t at = 0;
      for (Rank to = 0; to < size(); ++to) {
        for (size_t i = 0; i < counts[to]; ++i) all[at++] = value(rank, to, i);
      }
      ASSERT_NO_FATAL_FAILURE(expect_done(group.reduce_scatter(all.view(), own.view(), ReduceOp::kSum, {}, counts)));
      for (size_t i = 0; i < own.count(); ++i) ASSERT_EQ(own[i], sum(size(), rank, i)) << i << " of " << own.count();
    }
  });
}

TEST_P(GroupContract, AllGatherSupportsUnevenBlocksAndSegments) {
  run([&](Group& group) {
    const Rank rank = group.membership().rank;
    for (const size_t scale : {1, 17, 9'001}) {
      const auto counts = uneven_counts(size(), scale);
      Memory all(total(counts), scale == 17), own(counts[rank], scale == 17);
      for (size_t i = 0; i < own.count(); ++i) own[i] = value(rank, 0, i);
      ASSERT_NO_FATAL_FAILURE(expect_done(group.all_gather(own.view(), all.view(), {}, counts)));
      size_t at = 0;
      for (Rank from = 0; from < size(); ++from) {
        for (size_t i = 0; i < counts[from]; ++i) ASSERT_EQ(all[at++], value(from, 0, i)) << "from " << from;
      }
      ASSERT_TRUE(all.guards_hold());
    }
  });
}

TEST_P(GroupContract, AllToAllExchangesEveryPairOfBlocks) {
  run([&](Group& group) {
    const Rank rank = group.membership().rank;
    for_each_length([&](size_t count, bool pieces) {
      Memory out(count * size(), pieces), in(count * size(), pieces);
      for (size_t i = 0; i < out.count(); ++i) out[i] = value(rank, static_cast<Rank>(i / count), i % count);
      ASSERT_NO_FATAL_FAILURE(expect_done(group.all_to_all(out.view(), in.view())));
      for (size_t i = 0; i < in.count(); ++i) {
        ASSERT_EQ(in[i], value(static_cast<Rank>(i / count), rank, i % count)) << i << " of blocks of " << count;
      }
      ASSERT_TRUE(in.guards_hold());
    });
  });
}

TEST_P(GroupContract, AllToAllSupportsUnevenBlocks) {
  run([&](Group& group) {
    const Rank rank = group.membership().rank;
    for (const size_t scale : {1, 17, 9'001}) {
      std::vector<size_t> send(size()), receive(size());
      for (Rank peer = 0; peer < size(); ++peer) {
        send[peer] = uneven(rank, peer, scale);
        receive[peer] = uneven(peer, rank, scale);
      }
      Memory out(total(send), scale == 17), in(total(receive), scale == 17);
      size_t at = 0;
      for (Rank to = 0; to < size(); ++to) {
        for (size_t i = 0; i < send[to]; ++i) out[at++] = value(rank, to, i);
      }
      ASSERT_NO_FATAL_FAILURE(expect_done(group.all_to_all(out.view(), in.view(), {}, send, receive)));
      at = 0;
      for (Rank from = 0; from < size(); ++from) {
        for (size_t i = 0; i < receive[from]; ++i) ASSERT_EQ(in[at++], value(from, rank, i)) << "from " << from;
      }
      ASSERT_TRUE(in.guards_hold());
    }
  });
}

TEST_P(GroupContract, TensorsInSegmentsAreReducedAndBroadcast) {
  run([&](Group& group) {
    const Rank rank = group.membership().rank;
    for_each_length([&](size_t count, bool pieces) {
      Memory data(count, pieces);
      for (size_t i = 0; i < count; ++i) data[i] = value(rank, 0, i);
      ASSERT_NO_FATAL_FAILURE(expect_done(group.all_reduce(data.view(), ReduceOp::kSum)));
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(data[i], sum(size(), 0, i)) << i << " of " << count;
      for (size_t i = 0; i < count; ++i) data[i] = value(rank, 0, i);
      const Rank root = static_cast<Rank>(count) % size();
      ASSERT_NO_FATAL_FAILURE(expect_done(group.broadcast(data.view(), root)));
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(data[i], value(root, 0, i)) << i << " of " << count;
      ASSERT_TRUE(data.guards_hold());
    });
  });
}

TEST_P(GroupContract, EveryReduceOpMatchesItsDefinition) {
  run([&](Group& group) {
    const auto combined = [&](ReduceOp op) {
      int32_t all = group.membership().rank + 1;
      EXPECT_TRUE(group.all_reduce({&all, 1, Dtype::kInt32}, op).result()) << name(op);
      return all;
    };
    int32_t product = 1, all_and = ~0, all_or = 0, all_xor = 0;
    for (int32_t each = 1; each <= size(); ++each) product *= each, all_and &= each, all_or |= each, all_xor ^= each;
    EXPECT_EQ(combined(ReduceOp::kProduct), product);
    EXPECT_EQ(combined(ReduceOp::kMin), 1);
    EXPECT_EQ(combined(ReduceOp::kMax), size());
    EXPECT_EQ(combined(ReduceOp::kAverage), (size() + 1) / 2);
    if (!kind().has_bitwise_reductions) return;
    EXPECT_EQ(combined(ReduceOp::kBitAnd), all_and);
    EXPECT_EQ(combined(ReduceOp::kBitOr), all_or);
    EXPECT_EQ(combined(ReduceOp::kBitXor), all_xor);
  });
}

TEST_P(GroupContract, PremultipliedSumsScaleEachRanksInputFirst) {
  run([&](Group& group) {
    const Rank rank = group.membership().rank;
    const double factor = rank + 1;
    double expected = 0;
    for (Rank each = 0; each < size(); ++each) expected += (each + 1) * 10.0 * each;
    const std::vector<double> input(3 * size(), 10.0 * rank);
    std::vector<double> data = input, block(3);
    const auto view = [](std::vector<double>& of) { return BufferView{of.data(), of.size(), Dtype::kFloat64}; };
    ASSERT_NO_FATAL_FAILURE(expect_done(group.all_reduce(view(data), ReduceOp::kPremulSum, {}, factor)));
    EXPECT_EQ(data, std::vector<double>(data.size(), expected));
    data = input;
    ASSERT_NO_FATAL_FAILURE(
        expect_done(group.reduce_scatter(view(data), view(block), ReduceOp::kPremulSum, {}, {}, factor)));
    EXPECT_EQ(block, std::vector<double>(3, expected));
    EXPECT_EQ(data, input);
    ASSERT_NO_FATAL_FAILURE(expect_done(group.reduce(view(data), ReduceOp::kPremulSum, size() - 1, {}, factor)));
    EXPECT_EQ(data, rank == size() - 1 ? std::vector<double>(data.size(), expected) : input);
  });
}

TEST_P(GroupContract, AveragesOfReduceAndReduceScatterDivideTheSum) {
  run([&](Group& group) {
    std::vector<float> data(2 * size(), 3.0f * group.membership().rank), block(2);
    const float expected = 3.0f * (size() - 1) / 2;
    ASSERT_NO_FATAL_FAILURE(expect_done(group.reduce_scatter({data.data(), data.size(), Dtype::kFloat32},
                                                             {block.data(), 2, Dtype::kFloat32}, ReduceOp::kAverage)));
    EXPECT_EQ(block, std::vector<float>(2, expected));
    ASSERT_NO_FATAL_FAILURE(
        expect_done(group.reduce({data.data(), data.size(), Dtype::kFloat32}, ReduceOp::kAverage, 0)));
    if (group.membership().rank == 0) {
      EXPECT_EQ(data, std::vector<float>(data.size(), expected));
    }
  });
}

TEST_P(GroupContract, AveragesOfHalvesAreFiniteIfTheirSumOverflows) {
  constexpr uint16_t k32768 = 0x7800;  // 32768 as float16; its small multiples need no rounding
  run([&](Group& group) {
    expect_average_of_equals(group, Dtype::kFloat16, k32768);
    expect_average_of_equals(group, Dtype::kComplex32, k32768);
  });
}

/// Compares sums with sums in float64. The error bound is that of docs/reference/collectives.md: on one host a sum is
/// rounded once, and over links at most once for each addition of another rank's elements.
template <class T>
void expect_rounded_sums(Group& group, Dtype dtype, double half_place) {
  const auto [rank, size, name, generation] = group.membership();
  const auto element = [](Rank from, size_t index) {
    return narrow(static_cast<float>(1 + (index * 37 + static_cast<size_t>(from) * 101) % 1009) / 1024, T{});
  };
  const int roundings = group.transport() == "shm" ? 1 : size - 1;
  for (const size_t count : {size_t{1}, size_t{13}, size_t{700}, size_t{200'003}}) {
    std::vector<T> data(count);
    for (size_t i = 0; i < count; ++i) data[i] = element(rank, i);
    expect_done(group.all_reduce({data.data(), count, dtype}, ReduceOp::kSum));
    for (size_t i = 0; i < count; ++i) {
      double sum = 0;
      for (Rank from = 0; from < size; ++from) sum += widen(element(from, i));
      ASSERT_NEAR(widen(data[i]), sum, sum * (std::pow(1 + half_place, roundings) - 1)) << i << " of " << count;
    }
  }
}

TEST_P(GroupContract, SumsOfHalvesAreNearTheirSumInFloat64) {
  run([&](Group& group) {
    constexpr double kBefore = 1.001;  // allows for the rounding of the float32 additions
    expect_rounded_sums<Half>(group, Dtype::kFloat16, 0x1p-11 * kBefore);
    expect_rounded_sums<Bfloat16>(group, Dtype::kBfloat16, 0x1p-8 * kBefore);
  });
}

TEST_P(GroupContract, EveryDtypeMoves) {
  run([&](Group& group) {
    const auto rank = static_cast<uint8_t>(group.membership().rank);
    for (int i = 0; i < kDtypeCount; ++i) {
      const auto dtype = static_cast<Dtype>(i);
      std::vector<uint8_t> block(3 * size_of(dtype), rank), all(block.size() * size());
      ASSERT_NO_FATAL_FAILURE(expect_done(
          group.all_gather({block.data(), 3, dtype}, {all.data(), 3 * static_cast<size_t>(size()), dtype})));
      for (size_t at = 0; at < all.size(); ++at) ASSERT_EQ(all[at], at / block.size()) << name(dtype);
      ASSERT_NO_FATAL_FAILURE(expect_done(group.broadcast({block.data(), 3, dtype}, size() - 1)));
      ASSERT_EQ(block, std::vector<uint8_t>(block.size(), static_cast<uint8_t>(size() - 1))) << name(dtype);
    }
  });
}

}  // namespace muster
