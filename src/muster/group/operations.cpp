// Turns the calls of Group into operations, and makes the checks that a rank can make without the other ranks.
#include "muster/group/operations.h"

#include <fmt/format.h>

#include <numeric>

#include "muster/base/hash.h"
#include "muster/group/group.h"

namespace muster {
namespace {

tl::unexpected<Error> invalid(const Operation& operation, const std::string& what) {
  return fail(ErrorCode::kInvalidArgument, fmt::format("{}: {}", name(operation.call.collective), what));
}

/// Every rank passes `given`. `other` may be empty, because some collectives use it at the root only.
Result<> infer_dtype(Operation& operation, const BufferView& given, const BufferView& other) {
  if (given.bytes() > 0 && other.bytes() > 0 && given.dtype() != other.dtype()) {
    return invalid(operation, fmt::format("input and output differ in dtype: {} and {}", name(operation.input.dtype()),
                                          name(operation.output.dtype())));
  }
  operation.call.dtype = given.bytes() == 0 && other.bytes() > 0 ? other.dtype() : given.dtype();
  return {};
}

/// `whole` holds the blocks of all ranks. This rank's block has the length of `own`.
Result<> infer_blocks(Operation& operation, const BufferView& own, const BufferView& whole, const GroupSpec& self) {
  const auto& counts = operation.counts;
  if (counts.empty()) {
    operation.call.count = own.count();
    if (whole.count() == own.count() * self.size) return {};
    return invalid(operation, fmt::format("{} ranks with {} elements each need {}, not {}", self.size, own.count(),
                                          own.count() * self.size, whole.count()));
  }
  if (counts.size() != static_cast<size_t>(self.size)) {
    return invalid(operation, fmt::format("{} counts for {} ranks", counts.size(), self.size));
  }
  if (counts[self.rank] != own.count()) {
    return invalid(operation,
                   fmt::format("this rank's block has {} elements, its count is {}", own.count(), counts[self.rank]));
  }
  if (whole.count() != total(counts)) {
    return invalid(operation,
                   fmt::format("the counts make {} elements, the memory has {}", total(counts), whole.count()));
  }
  operation.call.count = total(counts);
  operation.call.layout = fnv1a(counts) | 1;  // never zero, which means equal blocks
  return {};
}

Result<> infer_all_to_all(Operation& operation, const GroupSpec& self) {
  const BufferView &input = operation.input, &output = operation.output;
  const auto &send = operation.counts, &receive = operation.receive_counts;
  const size_t size = self.size;
  if (send.empty() && receive.empty()) {
    operation.call.count = input.count() / size;
    if (input.bytes() == output.bytes() && input.count() % size == 0) return {};
    return invalid(operation, fmt::format("{} elements to send and {} to receive are not {} equal blocks each",
                                          input.count(), output.count(), size));
  }
  // The counts differ between ranks, so the layout only says that there are counts.
  operation.call.layout = 1;
  if (send.size() == size && receive.size() == size && total(send) == input.count() &&
      total(receive) == output.count()) {
    if (send[self.rank] == receive[self.rank]) return {};
    return invalid(operation, fmt::format("rank {} sends {} elements to itself and receives {} from itself", self.rank,
                                          send[self.rank], receive[self.rank]));
  }
  return invalid(
      operation,
      fmt::format("{} and {} counts, which make {} and {} elements, for {} ranks with {} elements "
                  "to send and {} to receive",
                  send.size(), receive.size(), total(send), total(receive), size, input.count(), output.count()));
}

Result<> infer_tensor(Operation& operation, const GroupSpec& self) {
  const bool root = self.rank == operation.call.root;
  const bool everywhere = operation.call.collective != Collective::kReduce;
  const bool sends = operation.call.collective != Collective::kBroadcast || root;
  const BufferView& tensor = everywhere ? operation.output : operation.input;
  operation.call.count = tensor.count();
  if ((!sends || operation.input.bytes() == tensor.bytes()) &&
      ((!everywhere && !root) || operation.output.bytes() == tensor.bytes())) {
    return {};
  }
  return invalid(operation, fmt::format("input and output differ in length: {} and {} elements",
                                        operation.input.count(), operation.output.count()));
}

}  // namespace

Result<> check_timeout(Duration timeout, const std::string& group) {
  if (timeout > Duration::zero()) return {};
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("the timeout of group \"{}\" must be greater than zero, not {:g} s", group,
                          std::chrono::duration<double>(timeout).count()));
}

size_t total(const std::vector<size_t>& counts) { return std::accumulate(counts.begin(), counts.end(), size_t{0}); }

Result<> validate_and_infer(Operation& operation, const GroupSpec& self) {
  Call& call = operation.call;
  const BufferView &input = operation.input, &output = operation.output;
  call.layout = 0;
  if (call.root < 0 || call.root >= self.size) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{} with root {}, but the group's ranks are 0 to {}",
                                                         name(call.collective), call.root, self.size - 1));
  }
  const bool gives_output = call.collective == Collective::kScatter || call.collective == Collective::kReduceScatter ||
                            call.collective == Collective::kBroadcast;
  MUSTER_TRY(infer_dtype(operation, gives_output ? output : input, gives_output ? input : output));
  if (reduces(call.collective) && !reducible(call.dtype, call.op)) return check_reducible(call.dtype, call.op);
  switch (call.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
    case Collective::kBroadcast:
      return infer_tensor(operation, self);
    case Collective::kAllGather:
      return infer_blocks(operation, input, output, self);
    case Collective::kReduceScatter:
      return infer_blocks(operation, output, input, self);
    case Collective::kGather:
      call.count = input.count();
      return self.rank == call.root ? infer_blocks(operation, input, output, self) : Result<>{};
    case Collective::kScatter:
      call.count = output.count();
      return self.rank == call.root ? infer_blocks(operation, output, input, self) : Result<>{};
    case Collective::kAllToAll:
      return infer_all_to_all(operation, self);
    case Collective::kBarrier:
      return {};
  }
  return fail(ErrorCode::kInvalidArgument, "unknown collective");
}

Work Group::submit(Operation operation, const CallOptions& options) {
  if (auto valid = validate_and_infer(operation, membership()); !valid) return Work(std::move(valid));
  return begin(std::move(operation), options);
}

std::vector<Work> Group::exchange(std::vector<Message> messages, const CallOptions& options) {
  CallOptions ahead = options;
  ahead.async = true;
  std::vector<Work> begun;
  for (const bool sends : {false, true}) {  // receives first, so that messages find their buffers
    for (Message& each : messages) {
      if (each.send != sends) continue;
      begun.push_back(sends ? send(std::move(each.data), each.peer, each.tag, ahead)
                            : receive(std::move(each.data), each.peer, each.tag, ahead));
    }
  }
  if (!options.async) {
    for (const Work& each : begun) (void)each.wait();
  }
  return begun;
}

Work Group::submit(std::vector<Operation> operations, const CallOptions& options) {
  for (Operation& operation : operations) {
    if (auto valid = validate_and_infer(operation, membership()); !valid) return Work(std::move(valid));
  }
  return begin_all(std::move(operations), options);
}

Work Group::begin_all(std::vector<Operation>&& operations, const CallOptions& options) {
  operations = coalesce(std::move(operations), membership().size);
  // The operations run in order, and after a failure all later operations fail with the same error. So the result of
  // the last operation is the result of the list.
  Work last{Result<>{}};
  CallOptions ahead = options;
  ahead.async = true;
  for (size_t i = 0; i < operations.size(); ++i) {
    last = begin(std::move(operations[i]), i + 1 < operations.size() ? ahead : options);
    if (last.done() && !last.result()) break;
  }
  return last;
}

Work Group::all_reduce(BufferView data, ReduceOp op, const CallOptions& options, double factor) {
  return submit(Operation{{.collective = Collective::kAllReduce, .op = op}, data, std::move(data), {}, {}, factor},
                options);
}

Work Group::reduce(BufferView data, ReduceOp op, Rank root, const CallOptions& options, double factor) {
  return submit(
      Operation{{.collective = Collective::kReduce, .op = op, .root = root}, data, std::move(data), {}, {}, factor},
      options);
}

Work Group::broadcast(BufferView data, Rank root, const CallOptions& options) {
  return submit(Operation{{.collective = Collective::kBroadcast, .root = root}, data, std::move(data)}, options);
}

Work Group::all_gather(BufferView input, BufferView output, const CallOptions& options, std::vector<size_t> counts) {
  return submit(Operation{{Collective::kAllGather}, std::move(input), std::move(output), std::move(counts)}, options);
}

Work Group::gather(BufferView input, BufferView output, Rank root, const CallOptions& options) {
  return submit(Operation{{.collective = Collective::kGather, .root = root}, std::move(input), std::move(output)},
                options);
}

Work Group::scatter(BufferView input, BufferView output, Rank root, const CallOptions& options) {
  return submit(Operation{{.collective = Collective::kScatter, .root = root}, std::move(input), std::move(output)},
                options);
}

Work Group::reduce_scatter(BufferView input, BufferView output, ReduceOp op, const CallOptions& options,
                           std::vector<size_t> counts, double factor) {
  return submit(Operation{{.collective = Collective::kReduceScatter, .op = op},
                          std::move(input),
                          std::move(output),
                          std::move(counts),
                          {},
                          factor},
                options);
}

Work Group::all_to_all(BufferView input, BufferView output, const CallOptions& options, std::vector<size_t> send_counts,
                       std::vector<size_t> receive_counts) {
  return submit(Operation{{Collective::kAllToAll},
                          std::move(input),
                          std::move(output),
                          std::move(send_counts),
                          std::move(receive_counts)},
                options);
}

Work Group::barrier(const CallOptions& options) { return submit(Operation{}, options); }

}  // namespace muster
