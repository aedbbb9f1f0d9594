#include "collective/host_trial.h"

#include <fmt/format.h>

#include <cstring>
#include <deque>
#include <mutex>
#include <numeric>
#include <thread>

#include "kernels/reduce_reference.h"
#include "muster/base/check.h"
#include "muster/base/random.h"
#include "muster/kernels/reduce.h"

namespace muster::test {
namespace {

constexpr uint8_t kFill = 0xa5;

/// Memory of one buffer of one rank: segments, each followed by a gap of fill bytes.
struct Memory {
  std::vector<Segment> segments;
  std::deque<Bytes> owned;

  size_t bytes() const {
    size_t all = 0;
    for (const Segment& segment : segments) all += segment.bytes;
    return all;
  }
  Bytes content() const {
    Bytes all;
    for (const Segment& segment : segments) {
      const auto* data = static_cast<const uint8_t*>(segment.data);
      all.insert(all.end(), data, data + segment.bytes);
    }
    return all;
  }
  void fill(const Bytes& from) const {
    size_t at = 0;
    for (const Segment& segment : segments) {
      if (segment.bytes > 0) std::memcpy(segment.data, from.data() + at, segment.bytes);
      at += segment.bytes;
    }
  }
};

struct Setup {
  const HostCommCase& trial;
  const Provider& provider;
  int size;
  std::vector<std::vector<size_t>> counts;  ///< by sender for all_to_all, else one entry for all ranks
  std::vector<Bytes> inputs;                ///< copies of the inputs from before the call
  std::vector<Memory> input, output;
  std::vector<bool> shared;  ///< true if one of input and output is the other one, or a part of it

  size_t element() const { return size_of(trial.dtype); }
  size_t count(Rank from, Rank to) const {
    if (!trial.uneven) return trial.count;
    return trial.collective == Collective::kAllToAll ? counts[from][to] : counts[0][to];
  }
  size_t sum(Rank from) const {
    size_t all = 0;
    for (Rank to = 0; to < size; ++to) all += count(from, to);
    return all;
  }
};

Memory make_memory(const Setup& setup, Rank rank, size_t count) {
  Memory memory;
  const size_t element = setup.element(), pieces = std::max<size_t>(1, setup.trial.segments);
  for (size_t piece = 0; piece < pieces; ++piece) {
    const size_t begin = count * piece / pieces, end = count * (piece + 1) / pieces;
    const size_t bytes = (end - begin) * element;
    uint8_t* data = setup.provider ? setup.provider(rank, bytes + 64) : nullptr;
    if (data == nullptr) data = memory.owned.emplace_back(bytes + 64).data();
    std::memset(data, kFill, bytes + 64);
    memory.segments.push_back({data, bytes});
  }
  return memory;
}

BufferView view(const Memory& memory, Dtype dtype) {
  if (memory.segments.size() == 1) {
    return {memory.segments[0].data, memory.segments[0].bytes / size_of(dtype), dtype};
  }
  return BufferView(memory.segments, dtype);
}

/// The part of `whole` that is a rank's own block. `whole` must be contiguous.
Memory part_of(const Memory& whole, size_t begin, size_t bytes) {
  Memory part;
  part.segments.push_back({static_cast<uint8_t*>(whole.segments[0].data) + begin, bytes});
  return part;
}

Bytes random_elements(size_t count, Dtype dtype, Random& random) {
  Bytes bytes(count * size_of(dtype));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.next());
  const auto small = [&](size_t parts, auto convert) {
    for (size_t i = 0; i < bytes.size() / sizeof(convert(0.0)); ++i) {
      const auto value = convert(random.uniform() * 4 - 2);
      std::memcpy(bytes.data() + i * sizeof(value), &value, sizeof(value));
    }
    (void)parts;
  };
  switch (dtype) {
    case Dtype::kFloat32:
    case Dtype::kComplex64:
      small(1, [](double x) { return static_cast<float>(x); });
      break;
    case Dtype::kFloat64:
    case Dtype::kComplex128:
      small(1, [](double x) { return x; });
      break;
    case Dtype::kFloat16:
    case Dtype::kComplex32:
      small(1, [](double x) { return static_cast<uint16_t>(0x3c00 + static_cast<int>(x * 256)); });
      break;
    case Dtype::kBfloat16:
      small(1, [](double x) { return static_cast<uint16_t>(0x3f80 + static_cast<int>(x * 256)); });
      break;
    case Dtype::kBool:
      for (uint8_t& byte : bytes) byte &= 1;
      break;
    default:
      break;
  }
  return bytes;
}

size_t input_count(const Setup& setup, Rank rank) {
  switch (setup.trial.collective) {
    case Collective::kScatter:
    case Collective::kReduceScatter:
    case Collective::kAllToAll:
      return setup.sum(rank);
    case Collective::kAllGather:
    case Collective::kGather:
      return setup.count(0, rank);
    case Collective::kBarrier:
      return 0;
    default:
      return setup.trial.count;
  }
}

size_t output_count(const Setup& setup, Rank rank) {
  size_t received = 0;
  for (Rank from = 0; from < setup.size; ++from) received += setup.count(from, rank);
  switch (setup.trial.collective) {
    case Collective::kAllToAll:
      return received;
    case Collective::kAllGather:
    case Collective::kGather:
      return setup.sum(0);
    case Collective::kScatter:
    case Collective::kReduceScatter:
      return setup.count(0, rank);
    default:
      return input_count(setup, rank);
  }
}

bool takes_part(const HostCommCase& trial, Rank rank, bool output) {
  switch (trial.collective) {
    case Collective::kGather:
      return !output || rank == trial.root;
    case Collective::kScatter:
      return output || rank == trial.root;
    default:
      return true;
  }
}

size_t own_begin(const Setup& setup, Rank rank) {
  size_t before = 0;
  for (Rank peer = 0; peer < rank; ++peer) before += setup.count(0, peer);
  return before * setup.element();
}

void prepare(Setup& setup, Rank rank, Random& random) {
  const HostCommCase& trial = setup.trial;
  const bool whole = trial.collective == Collective::kAllReduce || trial.collective == Collective::kReduce ||
                     trial.collective == Collective::kBroadcast;
  const bool into_output = trial.collective == Collective::kAllGather || trial.collective == Collective::kGather;
  const bool from_input = trial.collective == Collective::kScatter || trial.collective == Collective::kReduceScatter;
  const size_t in = input_count(setup, rank), out = output_count(setup, rank);
  Memory& input = setup.input[rank];
  Memory& output = setup.output[rank];
  if (takes_part(trial, rank, false)) input = make_memory(setup, rank, in);
  if (takes_part(trial, rank, true)) output = make_memory(setup, rank, out);
  if (whole) {
    output = Memory{input.segments, {}};
  } else if (trial.in_place && trial.segments == 1 && !input.segments.empty() && !output.segments.empty()) {
    if (into_output) input = part_of(output, own_begin(setup, rank), in * setup.element());
    if (from_input) output = part_of(input, own_begin(setup, rank), out * setup.element());
  }
  setup.inputs[rank] = random_elements(input.segments.empty() ? 0 : in, trial.dtype, random);
  input.fill(setup.inputs[rank]);
}

double factor_of(Rank rank) { return 0.5 + 0.25 * rank; }

Operation operation_of(const Setup& setup, Rank rank) {
  const HostCommCase& trial = setup.trial;
  Operation operation;
  operation.call = {.collective = trial.collective,
                    .dtype = trial.dtype,
                    .op = trial.op,
                    .root = trial.root,
                    .count = trial.count,
                    .layout = 0,
                    .sequence = trial.sequence};
  operation.factor = factor_of(rank);
  operation.input = view(setup.input[rank], trial.dtype);
  operation.output = view(setup.output[rank], trial.dtype);
  if (!trial.uneven) return operation;
  operation.call.layout = 1;
  operation.call.count = trial.collective == Collective::kAllToAll ? 0 : setup.sum(0);
  operation.counts = setup.counts[trial.collective == Collective::kAllToAll ? rank : 0];
  if (trial.collective == Collective::kAllToAll) {
    for (Rank from = 0; from < setup.size; ++from) operation.receive_counts.push_back(setup.count(from, rank));
  }
  return operation;
}

/// Combines halves in float32 and rounds once.
template <class H>
void combine_halves(Bytes& result, const std::vector<const void*>& sources, ReduceOp op) {
  const auto get = [](const void* from, size_t index) {
    H half;
    std::memcpy(&half, static_cast<const uint8_t*>(from) + index * sizeof(H), sizeof(H));
    return widen(half);
  };
  for (size_t i = 0; i < result.size() / sizeof(H); ++i) {
    float all = get(sources[0], i);
    for (size_t s = 1; s < sources.size(); ++s) all = test::combined(all, get(sources[s], i), op);
    if (op == ReduceOp::kAverage) all /= static_cast<float>(sources.size());
    const H half = narrow(all, H{});
    std::memcpy(result.data() + i * sizeof(H), &half, sizeof(H));
  }
}

/// Combines the bytes [begin, begin + bytes) of all ranks, one rank after the other.
Bytes combined(const Setup& setup, size_t begin, size_t bytes) {
  const HostCommCase& trial = setup.trial;
  const size_t count = bytes / setup.element();
  std::vector<Bytes> parts;
  std::vector<const void*> sources;
  for (Rank rank = 0; rank < setup.size; ++rank) {
    Bytes& part = parts.emplace_back(setup.inputs[rank].begin() + begin, setup.inputs[rank].begin() + begin + bytes);
    if (trial.op == ReduceOp::kPremulSum) scale(part.data(), part.data(), count, trial.dtype, factor_of(rank));
  }
  for (const Bytes& part : parts) sources.push_back(part.data());
  Bytes result(bytes);
  const bool complex_halves = trial.dtype == Dtype::kComplex32 && trial.op != ReduceOp::kProduct;
  if (trial.dtype == Dtype::kFloat16 || complex_halves) {
    combine_halves<Half>(result, sources, trial.op);
    return result;
  }
  if (trial.dtype == Dtype::kBfloat16) {
    combine_halves<Bfloat16>(result, sources, trial.op);
    return result;
  }
  reduce_many(result.data(), sources.data(), setup.size, count, trial.dtype, trial.op);
  if (trial.op == ReduceOp::kAverage) divide_by(result.data(), count, trial.dtype, setup.size);
  return result;
}

Bytes expected(const Setup& setup, Rank rank) {
  const HostCommCase& trial = setup.trial;
  const size_t element = setup.element();
  Bytes all;
  const auto append = [&](const Bytes& from, size_t begin, size_t count) {
    all.insert(all.end(), from.begin() + begin * element, from.begin() + (begin + count) * element);
  };
  switch (trial.collective) {
    case Collective::kAllReduce:
      return combined(setup, 0, trial.count * element);
    case Collective::kReduce:
      return rank == trial.root ? combined(setup, 0, trial.count * element) : setup.inputs[rank];
    case Collective::kReduceScatter:
      return combined(setup, own_begin(setup, rank), setup.count(0, rank) * element);
    case Collective::kBroadcast:
      return setup.inputs[trial.root];
    case Collective::kScatter:
      append(setup.inputs[trial.root], own_begin(setup, rank) / element, trial.count);
      return all;
    case Collective::kAllGather:
      for (const Bytes& input : setup.inputs) append(input, 0, input.size() / element);
      return all;
    case Collective::kGather:
      if (rank != trial.root) return {};
      for (const Bytes& input : setup.inputs) append(input, 0, input.size() / element);
      return all;
    case Collective::kAllToAll:
      for (Rank from = 0; from < setup.size; ++from) {
        size_t begin = 0;
        for (Rank to = 0; to < rank; ++to) begin += setup.count(from, to);
        append(setup.inputs[from], begin, setup.count(from, rank));
      }
      return all;
    case Collective::kBarrier:
      break;
  }
  return {};
}

bool untouched_behind(const Memory& memory) {
  for (size_t i = 0; i < memory.owned.size(); ++i) {
    const Bytes& owned = memory.owned[i];
    for (size_t at = owned.size() - 64; at < owned.size(); ++at) {
      if (owned[at] != kFill) return false;
    }
  }
  return true;
}

/// True if the collective must not change a rank's input. It may change an input that is the output or shares memory
/// with it.
bool keeps_input(const HostCommCase& trial) {
  return !trial.in_place &&
         (trial.collective == Collective::kAllGather || trial.collective == Collective::kGather ||
          trial.collective == Collective::kScatter || trial.collective == Collective::kReduceScatter ||
          trial.collective == Collective::kAllToAll);
}

std::string compare(const Setup& setup, Rank rank) {
  const Bytes wanted = expected(setup, rank), got = setup.output[rank].content();
  if (wanted.size() != got.size()) return fmt::format("rank {} has {} bytes, not {}", rank, got.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] != got[i]) return fmt::format("rank {}: byte {} of {} is wrong", rank, i, wanted.size());
  }
  if (keeps_input(setup.trial) && setup.input[rank].content() != setup.inputs[rank]) {
    return fmt::format("rank {}: the input was changed", rank);
  }
  if (!untouched_behind(setup.input[rank]) || !untouched_behind(setup.output[rank])) {
    return fmt::format("rank {}: wrote beyond its memory", rank);
  }
  return {};
}

}  // namespace

HostCommRanks::HostCommRanks(int size, size_t slot_bytes) {
  const auto memory = HostComm::allocate(size, slot_bytes);
  MUSTER_CHECK(memory.has_value(), "a test needs memory");
  for (Rank rank = 0; rank < size; ++rank) {
    auto comm = HostComm::attach(*memory, rank, size, [](Rank) { return Result<>(); });
    MUSTER_CHECK(comm.has_value(), comm.error().to_string());
    comms_.push_back(std::move(*comm));
  }
}

void HostCommRanks::use_arenas() {
  for (const auto& comm : comms_) comm->use(arenas_.emplace_back(Arena::create()));
}

uint8_t* ArenaBlocks::operator()(Rank rank, size_t bytes) {
  const auto data = ranks_.arena(rank).allocate(bytes);
  MUSTER_CHECK(data.has_value(), "an arena has memory for a trial");
  blocks_.emplace_back(rank, *data);
  return static_cast<uint8_t*>(*data);
}

void HostCommRanks::run(const std::function<void(Rank, HostComm&)>& body) {
  std::vector<std::thread> threads;
  for (Rank rank = 0; rank < size(); ++rank) threads.emplace_back([this, rank, &body] { body(rank, comm(rank)); });
  for (std::thread& thread : threads) thread.join();
}

std::string to_string(const HostCommCase& trial) {
  return fmt::format("{} of {} {} {} root {}{}{} in {} segments, seed {}", name(trial.collective), trial.count,
                     name(trial.dtype), name(trial.op), trial.root, trial.uneven ? ", uneven" : "",
                     trial.in_place ? ", in place" : "", trial.segments, trial.seed);
}

std::string fault_of(HostCommRanks& ranks, const HostCommCase& trial, const Provider& provider) {
  Random random(trial.seed);
  Setup setup{trial, provider, ranks.size(), {}, {}, {}, {}, {}};
  const auto size = static_cast<size_t>(ranks.size());
  setup.inputs.resize(size);
  setup.input.resize(size);
  setup.output.resize(size);
  for (size_t from = 0; from < size; ++from) {
    auto& row = setup.counts.emplace_back();
    for (size_t to = 0; to < size; ++to) row.push_back(random.chance(0.2) ? 0 : random.below(2 * trial.count + 1));
  }
  for (Rank rank = 0; rank < ranks.size(); ++rank) prepare(setup, rank, random);
  std::mutex mutex;
  std::string fault;
  ranks.run([&](Rank rank, HostComm& comm) {
    const auto result = run_on_host(comm, operation_of(setup, rank), Deadline::after(std::chrono::seconds(60)));
    const std::lock_guard lock(mutex);
    if (!result && fault.empty()) fault = fmt::format("rank {}: {}", rank, result.error().to_string());
  });
  for (Rank rank = 0; rank < ranks.size() && fault.empty(); ++rank) fault = compare(setup, rank);
  return fault;
}

}  // namespace muster::test
