// The calls of Group as operations. What each rank can check for itself is checked here.
#include <fmt/format.h>

#include <numeric>
#include <optional>

#include "muster/group/group.h"

namespace muster {
namespace {

Work invalid(const Operation& operation, const std::string& what) {
  return Work(fail(ErrorCode::kInvalidArgument, fmt::format("{}: {}", name(operation.call.collective), what)));
}

Operation operation_of(Collective collective, BufferView input, BufferView output) {
  Operation operation;
  operation.call.collective = collective;
  operation.call.dtype = collective == Collective::kScatter ? output.dtype() : input.dtype();
  operation.call.count = input.count();
  operation.input = std::move(input);
  operation.output = std::move(output);
  return operation;
}

size_t sum(const std::vector<size_t>& counts) { return std::accumulate(counts.begin(), counts.end(), size_t{0}); }

/// FNV-1a over the counts; never zero, which stands for equal blocks.
uint64_t digest(const std::vector<size_t>& counts) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const size_t count : counts) hash = (hash ^ count) * 0x100000001b3;
  return hash | 1;
}

/// What is wrong with the memory `whole` as the blocks of all ranks, of which this rank's is `own`.
std::optional<std::string> wrong_blocks(const BufferView& whole, const BufferView& own,
                                        const std::vector<size_t>& counts, const Membership& self) {
  if (own.bytes() > 0 && whole.bytes() > 0 && own.dtype() != whole.dtype()) {
    return fmt::format("input and output differ in dtype: {} and {}", name(own.dtype()), name(whole.dtype()));
  }
  if (counts.empty()) {
    if (whole.count() == own.count() * self.size) return {};
    return fmt::format("{} ranks with {} elements each need {}, not {}", self.size, own.count(),
                       own.count() * self.size, whole.count());
  }
  if (counts.size() != static_cast<size_t>(self.size)) {
    return fmt::format("{} counts for {} ranks", counts.size(), self.size);
  }
  if (counts[self.rank] != own.count()) {
    return fmt::format("this rank's block has {} elements, its count is {}", own.count(), counts[self.rank]);
  }
  if (whole.count() == sum(counts)) return {};
  return fmt::format("the counts make {} elements, the memory has {}", sum(counts), whole.count());
}

/// Blocks of different lengths, on which all ranks agree.
void set_uneven(Operation& operation, std::vector<size_t> counts) {
  if (counts.empty()) return;
  operation.call.count = sum(counts);
  operation.call.layout = digest(counts);
  operation.counts = std::move(counts);
}

}  // namespace

Work Group::all_reduce(BufferView data, ReduceOp op, const CallOptions& options) {
  Operation operation = operation_of(Collective::kAllReduce, data, data);
  operation.call.op = op;
  return submit(std::move(operation), options);
}

Work Group::reduce(BufferView data, ReduceOp op, Rank root, const CallOptions& options) {
  Operation operation = operation_of(Collective::kReduce, data, data);
  operation.call.op = op;
  operation.call.root = root;
  return submit(std::move(operation), options);
}

Work Group::broadcast(BufferView data, Rank root, const CallOptions& options) {
  Operation operation = operation_of(Collective::kBroadcast, data, data);
  operation.call.root = root;
  return submit(std::move(operation), options);
}

Work Group::all_gather(BufferView input, BufferView output, const CallOptions& options, std::vector<size_t> counts) {
  Operation operation = operation_of(Collective::kAllGather, std::move(input), std::move(output));
  if (const auto wrong = wrong_blocks(operation.output, operation.input, counts, membership())) {
    return invalid(operation, *wrong);
  }
  set_uneven(operation, std::move(counts));
  return submit(std::move(operation), options);
}

Work Group::gather(BufferView input, BufferView output, Rank root, const CallOptions& options) {
  Operation operation = operation_of(Collective::kGather, std::move(input), std::move(output));
  operation.call.root = root;
  if (membership().rank == root) {
    if (const auto wrong = wrong_blocks(operation.output, operation.input, {}, membership())) {
      return invalid(operation, *wrong);
    }
  }
  return submit(std::move(operation), options);
}

Work Group::scatter(BufferView input, BufferView output, Rank root, const CallOptions& options) {
  Operation operation = operation_of(Collective::kScatter, std::move(input), std::move(output));
  operation.call.root = root;
  operation.call.count = operation.output.count();
  if (membership().rank == root) {
    if (const auto wrong = wrong_blocks(operation.input, operation.output, {}, membership())) {
      return invalid(operation, *wrong);
    }
  }
  return submit(std::move(operation), options);
}

Work Group::reduce_scatter(BufferView input, BufferView output, ReduceOp op, const CallOptions& options,
                           std::vector<size_t> counts) {
  Operation operation = operation_of(Collective::kReduceScatter, std::move(input), std::move(output));
  operation.call.op = op;
  operation.call.count = operation.output.count();
  if (const auto wrong = wrong_blocks(operation.input, operation.output, counts, membership())) {
    return invalid(operation, *wrong);
  }
  set_uneven(operation, std::move(counts));
  return submit(std::move(operation), options);
}

Work Group::all_to_all(BufferView input, BufferView output, const CallOptions& options, std::vector<size_t> send_counts,
                       std::vector<size_t> receive_counts) {
  Operation operation = operation_of(Collective::kAllToAll, std::move(input), std::move(output));
  const size_t size = membership().size;
  if (send_counts.empty() && receive_counts.empty()) {
    if (operation.input.bytes() != operation.output.bytes() || operation.input.count() % size != 0) {
      return invalid(operation, fmt::format("{} elements to send and {} to receive are not {} equal blocks each",
                                            operation.input.count(), operation.output.count(), size));
    }
    operation.call.count = operation.input.count() / size;
    return submit(std::move(operation), options);
  }
  if (send_counts.size() != size || receive_counts.size() != size || sum(send_counts) != operation.input.count() ||
      sum(receive_counts) != operation.output.count()) {
    return invalid(operation,
                   fmt::format("{} and {} counts, which make {} and {} elements, for {} ranks with {} "
                               "elements to send and {} to receive",
                               send_counts.size(), receive_counts.size(), sum(send_counts), sum(receive_counts), size,
                               operation.input.count(), operation.output.count()));
  }
  operation.call.count = 0;
  operation.call.layout = 1;
  operation.counts = std::move(send_counts);
  operation.receive_counts = std::move(receive_counts);
  return submit(std::move(operation), options);
}

Work Group::barrier(const CallOptions& options) { return submit(Operation{}, options); }

}  // namespace muster
