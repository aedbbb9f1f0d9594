#include "collective/trial.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/reduce_reference.h"
#include "muster/base/check.h"
#include "muster/base/random.h"

namespace muster::test {
namespace {

template <class T>
T element(ByteView bytes, size_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

bool is_half(Dtype dtype) { return dtype == Dtype::kFloat16 || dtype == Dtype::kBfloat16; }
bool is_real(Dtype dtype) { return dtype == Dtype::kFloat32 || is_half(dtype); }

double real(ByteView bytes, size_t index, Dtype dtype) {
  if (dtype == Dtype::kFloat16) return widen(element<Half>(bytes, index));
  if (dtype == Dtype::kBfloat16) return widen(element<Bfloat16>(bytes, index));
  return element<float>(bytes, index);
}

uint64_t whole(ByteView bytes, size_t index, Dtype dtype) {
  return dtype == Dtype::kUint8 ? element<uint8_t>(bytes, index) : element<uint64_t>(bytes, index);
}

template <class T>
void put(Bytes& bytes, size_t index, T value) {
  std::memcpy(bytes.data() + index * sizeof(T), &value, sizeof(T));
}

/// Half-precision values are positive. Then partial sums only grow, so the rounding error of the last one bounds the
/// errors of the others.
void randomize(Bytes& bytes, Dtype dtype, Random& random) {
  for (size_t i = 0; i < bytes.size() / size_of(dtype); ++i) {
    const auto positive = static_cast<float>(random.uniform());
    if (dtype == Dtype::kFloat32) put(bytes, i, 2 * positive - 1);
    if (dtype == Dtype::kFloat16) put(bytes, i, narrow(positive, Half{}));
    if (dtype == Dtype::kBfloat16) put(bytes, i, narrow(positive, Bfloat16{}));
  }
  if (is_real(dtype)) return;
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.next());
}

/// The maximum number of roundings of a rank's contribution on its way to a result: docs/reference/collectives.md.
int roundings(const Algorithm& algorithm, int size) {
  const std::string_view name = algorithm.name;
  const int doublings = std::bit_width(static_cast<unsigned>(size - 1));
  return std::min(size - 1, name == "ring" ? size - 1 : name == "double_tree" ? 2 * doublings : doublings);
}

size_t sum(const std::vector<size_t>& counts) { return std::accumulate(counts.begin(), counts.end(), size_t{0}); }

bool may_be_uneven(Collective collective) {
  return collective == Collective::kAllGather || collective == Collective::kReduceScatter ||
         collective == Collective::kAllToAll;
}

}  // namespace

const Algorithm& algorithm(Collective collective, std::string_view name) {
  const Algorithm* found = find_algorithm(collective, name);
  MUSTER_CHECK(found != nullptr, "an algorithm that the test names is gone");
  return *found;
}

bool has_blocks(Collective collective) {
  return may_be_uneven(collective) || collective == Collective::kScatter || collective == Collective::kGather;
}

std::string parameter_name(const testing::TestParamInfo<Algorithm>& info) { return testing::PrintToString(info.param); }

Trial::Trial(const Algorithm& algorithm, const Setting& setting) : algorithm_(algorithm), setting_(setting) {
  setting_.uneven = setting.uneven && algorithm.uneven && may_be_uneven(algorithm.collective);
  choose_counts();
  Random random(setting_.seed);
  ranks_.resize(setting_.size);
  for (Rank rank = 0; rank < setting_.size; ++rank) {
    schedules_.push_back(algorithm.schedule(spec(rank)));
    scratch_.emplace_back(schedules_[rank].scratch_bytes, 0xdd);
    Bytes& original = ranks_[rank].original;
    original.resize(input_count(rank) * size_of(setting_.dtype));
    randomize(original, setting_.dtype, random);
    lay_out(rank);
  }
}

void Trial::choose_counts() {
  Random random(setting_.seed + 1);
  const bool matrix = algorithm_.collective == Collective::kAllToAll;
  counts_.resize(matrix ? setting_.size : 1, std::vector<size_t>(setting_.size, setting_.count));
  if (!setting_.uneven) return;
  for (auto& row : counts_) {
    for (size_t& count : row) count = random.chance(0.2) ? 0 : random.below(2 * setting_.count + 1);
  }
}

CollectiveSpec Trial::spec(Rank rank) const {
  CollectiveSpec spec{.collective = algorithm_.collective,
                      .rank = rank,
                      .size = setting_.size,
                      .count = setting_.count,
                      .element_bytes = size_of(setting_.dtype),
                      .root = setting_.root,
                      .chunk_bytes = setting_.chunk_bytes};
  if (!setting_.uneven) return spec;
  spec.count = 0;
  spec.counts = counts_[algorithm_.collective == Collective::kAllToAll ? rank : 0];
  if (algorithm_.collective != Collective::kAllToAll) return spec;
  for (const auto& row : counts_) spec.receive_counts.push_back(row[rank]);
  return spec;
}

size_t Trial::input_count(Rank rank) const {
  switch (algorithm_.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
      return setting_.count;
    case Collective::kBroadcast:
      return rank == setting_.root ? setting_.count : 0;
    case Collective::kAllGather:
    case Collective::kGather:
      return counts_[0][rank];
    case Collective::kScatter:
      return rank == setting_.root ? sum(counts_[0]) : 0;
    case Collective::kReduceScatter:
      return sum(counts_[0]);
    case Collective::kAllToAll:
      return sum(counts_[rank]);
    case Collective::kBarrier:
      return 0;
  }
  return 0;
}

size_t Trial::output_count(Rank rank) const {
  switch (algorithm_.collective) {
    case Collective::kAllReduce:
    case Collective::kBroadcast:
      return setting_.count;
    case Collective::kReduce:
      return rank == setting_.root ? setting_.count : 0;
    case Collective::kAllGather:
      return sum(counts_[0]);
    case Collective::kGather:
      return rank == setting_.root ? sum(counts_[0]) : 0;
    case Collective::kScatter:
    case Collective::kReduceScatter:
      return counts_[0][rank];
    case Collective::kAllToAll: {
      size_t count = 0;
      for (const auto& row : counts_) count += row[rank];
      return count;
    }
    case Collective::kBarrier:
      return 0;
  }
  return 0;
}

/// Bytes of the blocks before this rank's block, where blocks are in the order of ranks.
size_t Trial::blocks_before(Rank rank) const {
  if (!has_blocks(algorithm_.collective)) return 0;
  return std::accumulate(counts_[0].begin(), counts_[0].begin() + rank, size_t{0}) * size_of(setting_.dtype);
}

/// Lays out a rank's memory. In place, the shorter of input and output is a part of the longer one.
void Trial::lay_out(Rank rank) {
  RankMemory& rank_memory = ranks_[rank];
  const size_t in = rank_memory.original.size(), out = output_count(rank) * size_of(setting_.dtype);
  rank_memory.memory.assign(std::max(in, out), 0xee);
  const MutableByteView whole(rank_memory.memory);
  const bool shared = setting_.in_place && algorithm_.collective != Collective::kAllToAll && in > 0 && out > 0;
  if (shared) {
    rank_memory.input = in >= out ? whole : whole.subspan(blocks_before(rank), in);
    rank_memory.output = out >= in ? whole : whole.subspan(blocks_before(rank), out);
  } else {
    rank_memory.outside.assign(std::min(in, out), 0xee);
    rank_memory.input = in >= out ? whole : MutableByteView(rank_memory.outside);
    rank_memory.output = in >= out ? MutableByteView(rank_memory.outside) : whole;
  }
  std::ranges::copy(rank_memory.original, rank_memory.input.begin());
}

BufferView Trial::view(MutableByteView memory, uint64_t seed) const {
  const size_t element_bytes = size_of(setting_.dtype);
  if (!setting_.segments) return {memory.data(), memory.size() / element_bytes, setting_.dtype};
  Random random(seed);
  std::vector<Segment> segments;
  for (size_t offset = 0; offset < memory.size(); offset += segments.back().bytes) {
    const size_t elements = (memory.size() - offset) / element_bytes;
    segments.push_back({memory.data() + offset, (random.below(elements) + 1) * element_bytes});
  }
  return {std::move(segments), setting_.dtype};
}

Buffers Trial::buffers(Rank rank) const {
  const auto seed = setting_.seed + static_cast<uint64_t>(rank);
  return {.input = view(ranks_[rank].input, seed), .output = view(ranks_[rank].output, seed + 1), .op = ReduceOp::kSum};
}

MutableByteView Trial::memory(Rank rank, BufferKind buffer) {
  if (buffer == BufferKind::kScratch) return scratch_[rank];
  return buffer == BufferKind::kInput ? ranks_[rank].input : ranks_[rank].output;
}

std::string Trial::fault() const {
  for (Rank rank = 0; rank < setting_.size; ++rank) {
    const bool alike = algorithm_.collective == Collective::kAllReduce && rank > 0;
    if (alike && !std::ranges::equal(ranks_[rank].output, ranks_[0].output)) {
      return fmt::format("{}: rank {} differs from rank 0", name(), rank);
    }
    if (alike && !input_is_whole(rank)) return fmt::format("{}: the input of rank {} was written", name(), rank);
    if (std::string fault = alike ? std::string() : fault_of(rank); !fault.empty()) return fault;
  }
  return {};
}

std::string Trial::fault_of(Rank rank) const {
  if (!input_is_whole(rank)) return fmt::format("{}: the input of rank {} was written", name(), rank);
  if (reduces(algorithm_.collective)) return reduced_fault(rank);
  if (std::ranges::equal(ranks_[rank].output, moved(rank))) return {};
  return fmt::format("{}: rank {} has wrong bytes", name(), rank);
}

/// True if the input has not changed, except for bytes that are also output.
bool Trial::input_is_whole(Rank rank) const {
  const RankMemory& rank_memory = ranks_[rank];
  const auto is_output = [&](const uint8_t& byte) {
    return &byte >= rank_memory.output.data() && &byte < rank_memory.output.data() + rank_memory.output.size();
  };
  for (size_t i = 0; i < rank_memory.input.size(); ++i) {
    if (rank_memory.input[i] != rank_memory.original[i] && !is_output(rank_memory.input[i])) return false;
  }
  return true;
}

/// The allowed error of a sum of positive half-precision values. Each rounding adds at most half a unit in the last
/// place. The factor 1.001 covers the error of the float32 additions before it.
double Trial::tolerance(double sum) const {
  if (!is_half(setting_.dtype)) return 1e-5 * setting_.size;
  const double half_place = (setting_.dtype == Dtype::kFloat16 ? 0x1p-11 : 0x1p-8) * 1.001;
  return sum * (std::pow(1 + half_place, roundings(algorithm_, setting_.size)) - 1);
}

std::string Trial::reduced_fault(Rank rank) const {
  const ByteView output = ranks_[rank].output;
  const Dtype dtype = setting_.dtype;
  const size_t begin = algorithm_.collective == Collective::kReduceScatter ? blocks_before(rank) / size_of(dtype) : 0;
  for (size_t i = 0; i < output_count(rank); ++i) {
    double real_sum = 0;
    uint64_t whole_sum = 0;
    for (const RankMemory& rank_memory : ranks_) {
      if (is_real(dtype)) {
        real_sum += real(rank_memory.original, begin + i, dtype);
      } else {
        whole_sum += whole(rank_memory.original, begin + i, dtype);
      }
    }
    if (dtype == Dtype::kUint8) whole_sum %= 256;
    const bool right = is_real(dtype) ? std::abs(real(output, i, dtype) - real_sum) <= tolerance(real_sum)
                                      : whole(output, i, dtype) == whole_sum;
    if (!right) return fmt::format("{}: element {} of rank {} is wrong", name(), i, rank);
  }
  return {};
}

/// The output of a rank, according to the definition of the collective.
Bytes Trial::moved(Rank rank) const {
  Bytes wanted;
  const auto append = [&](const Bytes& from, size_t offset, size_t bytes) {
    wanted.insert(wanted.end(), from.begin() + offset, from.begin() + offset + bytes);
  };
  const size_t element_bytes = size_of(setting_.dtype);
  switch (algorithm_.collective) {
    case Collective::kBroadcast:
      return ranks_[setting_.root].original;
    case Collective::kScatter:
      append(ranks_[setting_.root].original, blocks_before(rank), counts_[0][rank] * element_bytes);
      return wanted;
    case Collective::kGather:
    case Collective::kAllGather:
      for (const RankMemory& rank_memory : ranks_) append(rank_memory.original, 0, rank_memory.original.size());
      if (output_count(rank) == 0) wanted.clear();
      return wanted;
    case Collective::kAllToAll:
      for (Rank from = 0; from < setting_.size; ++from) {
        const auto& row = counts_[from];
        append(ranks_[from].original, std::accumulate(row.begin(), row.begin() + rank, size_t{0}) * element_bytes,
               row[rank] * element_bytes);
      }
      return wanted;
    default:
      return {};
  }
}

std::string Trial::name() const {
  return fmt::format("{}/{} of {} ranks, count {}, {}, root {}, chunks of {}, {}place{}{}, seed {}",
                     muster::name(algorithm_.collective), algorithm_.name, setting_.size, setting_.count,
                     muster::name(setting_.dtype), setting_.root, setting_.chunk_bytes,
                     setting_.in_place ? "in " : "out of ", setting_.uneven ? ", uneven" : "",
                     setting_.segments ? ", in segments" : "", setting_.seed);
}

std::vector<size_t> boundary_counts(int size) {
  const size_t n = size;
  return {0, 1, 2, n - 1, n, n + 1, 1000, 12345};
}

}  // namespace muster::test
