#include "muster/torch/backend.h"

#include <unistd.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "muster/torch/exception.h"
#include "muster/torch/store.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

template <class... Parts>
void check_argument(bool condition, const char* title, const Parts&... message) {
  if (!condition) throw_error({ErrorCode::kInvalidArgument, c10::str(title, ": ", message...)});
}

muster::ReduceOp reduce_op(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAverage;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBitAnd;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBitOr;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBitXor;
    default:
      break;
  }
  throw_error({ErrorCode::kUnsupported, "muster does not do PREMUL_SUM yet; multiply the tensor, then use SUM"});
}

/// A tensor of the caller's as the core can take it: itself, or a plain copy.
struct Operand {
  at::Tensor tensor;
  BufferView view;
};

Operand operand(const at::Tensor& given) {
  value_or_throw(check_sendable(given));
  at::Tensor tensor = is_plain(given) ? given : given.resolve_conj().resolve_neg().contiguous();
  const BufferView view = value_or_throw(view_of(tensor));
  return {std::move(tensor), view};
}

/// The same for a tensor that the operation writes.
Operand operand_in_place(TensorWork& work, const at::Tensor& given) {
  Operand result = operand(given);
  if (!result.tensor.is_same(given)) work.copy_when_done(given, result.tensor);
  return result;
}

/// The parts of one call, queued one after the other. When one can't be prepared, those before it end first: their
/// tensors must not go before.
template <class Queue>
std::vector<muster::Work> queue_parts(Queue queue) {
  std::vector<muster::Work> parts;
  try {
    queue(parts);
  } catch (...) {
    for (const muster::Work& part : parts) static_cast<void>(part.wait());
    throw;
  }
  return parts;
}

/// Whether the slots lie one after another in memory, as the rows of one tensor do.
bool consecutive(const std::vector<at::Tensor>& slots) {
  const auto* next = static_cast<const uint8_t*>(slots.front().data_ptr());
  for (const at::Tensor& slot : slots) {
    if (!is_plain(slot) || slot.data_ptr() != next) return false;
    next += slot.nbytes();
  }
  return true;
}

/// What is wrong with one of an all-gather's slots must be known before any rank has begun.
void check_slots(const std::vector<at::Tensor>& slots, const at::Tensor& input, Rank rank, int size) {
  constexpr const char* kTitle = "all_gather";
  check_argument(static_cast<int>(slots.size()) == size, kTitle, "the output list has ", slots.size(),
                 " tensors, but the group has ", size, " ranks");
  for (const at::Tensor& slot : slots) {
    check_argument(slot.scalar_type() == input.scalar_type(), kTitle, "an output is ", slot.scalar_type(),
                   ", but the input is ", input.scalar_type());
    value_or_throw(check_sendable(slot));
  }
  check_argument(slots[rank].numel() == input.numel(), kTitle, "output ", rank, " has ", slots[rank].numel(),
                 " elements, but this rank's input has ", input.numel());
}

}  // namespace

c10::intrusive_ptr<TorchBackend> TorchBackend::create(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const Membership& membership, std::chrono::milliseconds timeout) {
  GroupOptions options = value_or_throw(group_options_from_environment());
  options.timeout = timeout;
  std::unique_ptr<Store> adapted = store_over_c10d(store);
  std::unique_ptr<Group> group = value_or_throw(Group::form(*adapted, membership, options));
  return c10::make_intrusive<TorchBackend>(std::move(adapted), std::move(group), timeout);
}

TorchBackend::TorchBackend(std::unique_ptr<Store> store, std::unique_ptr<Group> group,
                           std::chrono::milliseconds timeout)
    : Backend(group->membership().rank, group->membership().size),
      store_(std::move(store)),
      group_(std::move(group)),
      timeout_(timeout),
      options_(c10::make_intrusive<Options>("muster", timeout)),
      process_(getpid()) {
  options_->group_name = group_->membership().name;
}

TorchBackend::~TorchBackend() {
  if (getpid() == process_) return;
  // A forked child has the group's memory but not its threads: ending it here would wait for them for ever.
  static_cast<void>(group_.release());
  static_cast<void>(store_.release());
}

void TorchBackend::setTimeout(std::chrono::milliseconds timeout) {
  check_argument(timeout.count() > 0, "set_timeout", "the timeout must be positive");
  timeout_ = timeout;
  options_->timeout = timeout;
}

CallOptions TorchBackend::call(std::chrono::milliseconds timeout, bool async) const {
  return {.timeout = timeout.count() > 0 ? timeout : timeout_.load(), .async = async};
}

c10::intrusive_ptr<TensorWork> TorchBackend::new_work(c10d::OpType type, const char* title,
                                                      std::vector<at::Tensor> inputs,
                                                      std::vector<at::Tensor> outputs) const {
  return c10::make_intrusive<TensorWork>(rank_, type, title, std::move(inputs), std::move(outputs));
}

c10::intrusive_ptr<c10d::Work> TorchBackend::start(const c10::intrusive_ptr<TensorWork>& work, Parts parts) const {
  TensorWork::start(work, std::move(parts), group_->sequence(), pending_);
  return work;
}

c10::intrusive_ptr<c10d::Work> TorchBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                       const c10d::AllreduceOptions& options) {
  check_argument(tensors.size() == 1, "all_reduce", "takes one tensor per rank");
  auto work = new_work(c10d::OpType::ALLREDUCE, "muster:all_reduce", tensors, tensors);
  const Operand data = operand_in_place(*work, tensors.front());
  return start(work,
               {group_->all_reduce(data.view, reduce_op(options.reduceOp), call(options.timeout, options.asyncOp))});
}

c10::intrusive_ptr<c10d::Work> TorchBackend::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                                 const c10d::AllreduceCoalescedOptions& options) {
  auto work = new_work(c10d::OpType::ALLREDUCE_COALESCED, "muster:all_reduce", tensors, tensors);
  const ReduceOp op = reduce_op(options.reduceOp);
  std::vector<BufferView> views;
  for (const at::Tensor& tensor : tensors) views.push_back(operand_in_place(*work, tensor).view);
  Parts parts;
  for (const BufferView& view : views) {
    parts.push_back(group_->all_reduce(view, op, call(options.timeout, options.asyncOp)));
  }
  return start(work, std::move(parts));
}

c10::intrusive_ptr<c10d::Work> TorchBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                       const c10d::BroadcastOptions& options) {
  check_argument(tensors.size() == 1 && options.rootTensor == 0, "broadcast", "takes one tensor per rank");
  check_argument(options.rootRank >= 0 && options.rootRank < size_, "broadcast", "root ", options.rootRank,
                 " is not a rank of this group of ", size_);
  auto work = new_work(c10d::OpType::BROADCAST, "muster:broadcast", tensors, tensors);
  const Operand data = operand_in_place(*work, tensors.front());
  return start(work, {group_->broadcast(data.view, static_cast<Rank>(options.rootRank),
                                        call(options.timeout, options.asyncOp))});
}

void TorchBackend::gather_to_list(TensorWork& work, Parts& parts, const std::vector<at::Tensor>& slots,
                                  const at::Tensor& input, const CallOptions& options) {
  for (const at::Tensor& slot : slots) {
    if (slot.numel() != slots.front().numel()) return gather_uneven(work, parts, slots, input, options);
  }
  const Operand from = operand(input);
  work.keep_alive(from.tensor);
  if (consecutive(slots)) {
    const size_t count = static_cast<size_t>(input.numel()) * size_;
    parts.push_back(group_->all_gather(from.view, {slots.front().data_ptr(), count, from.view.dtype()}, options));
    return;
  }
  const at::Tensor rows = at::empty({size_, input.numel()}, input.options());
  for (int r = 0; r < size_; ++r) work.copy_when_done(slots[r], rows[r].view(slots[r].sizes()));
  parts.push_back(group_->all_gather(from.view, value_or_throw(view_of(rows)), options));
}

void TorchBackend::gather_uneven(TensorWork& work, Parts& parts, const std::vector<at::Tensor>& slots,
                                 const at::Tensor& input, const CallOptions& options) {
  {
    const at::NoGradGuard no_grad;
    slots[rank_].copy_(input.reshape(slots[rank_].sizes()));
  }
  for (Rank root = 0; root < size_; ++root) {
    parts.push_back(group_->broadcast(operand_in_place(work, slots[root]).view, root, options));
  }
}

void TorchBackend::gather_to_tensor(TensorWork& work, Parts& parts, const at::Tensor& output, const at::Tensor& input,
                                    const CallOptions& options) {
  const Operand from = operand(input);
  const Operand to = operand_in_place(work, output);
  work.keep_alive(from.tensor);
  parts.push_back(group_->all_gather(from.view, to.view, options));
}

c10::intrusive_ptr<c10d::Work> TorchBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                       std::vector<at::Tensor>& inputs,
                                                       const c10d::AllgatherOptions& options) {
  check_argument(inputs.size() == 1 && outputs.size() == 1, "all_gather", "takes one tensor and one list per rank");
  check_slots(outputs.front(), inputs.front(), rank_, size_);
  auto work = new_work(c10d::OpType::ALLGATHER, "muster:all_gather", inputs, outputs.front());
  return start(work, queue_parts([&](Parts& parts) {
                 gather_to_list(*work, parts, outputs.front(), inputs.front(), call(options.timeout, options.asyncOp));
               }));
}

c10::intrusive_ptr<c10d::Work> TorchBackend::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::AllgatherOptions& options) {
  check_argument(static_cast<int>(outputs.size()) == size_, "all_gather", "takes one output list for each rank");
  std::vector<std::vector<at::Tensor>> slots(inputs.size());
  std::vector<at::Tensor> flat;
  for (const auto& list : outputs) {
    check_argument(list.size() == inputs.size(), "all_gather", "an output list is not as long as the input list");
    for (size_t i = 0; i < list.size(); ++i) slots[i].push_back(list[i]);
    flat.insert(flat.end(), list.begin(), list.end());
  }
  for (size_t i = 0; i < inputs.size(); ++i) check_slots(slots[i], inputs[i], rank_, size_);
  auto work = new_work(c10d::OpType::ALLGATHER_COALESCED, "muster:all_gather", inputs, std::move(flat));
  return start(work, queue_parts([&](Parts& parts) {
                 for (size_t i = 0; i < inputs.size(); ++i) {
                   gather_to_list(*work, parts, slots[i], inputs[i], call(options.timeout, options.asyncOp));
                 }
               }));
}

c10::intrusive_ptr<c10d::Work> TorchBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                             const c10d::AllgatherOptions& options) {
  std::vector<at::Tensor> outputs{output};
  std::vector<at::Tensor> inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

c10::intrusive_ptr<c10d::Work> TorchBackend::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                             std::vector<at::Tensor>& inputs,
                                                                             const c10d::AllgatherOptions& options) {
  constexpr const char* kTitle = "all_gather_into_tensor";
  check_argument(outputs.size() == inputs.size(), kTitle, "there must be as many outputs as inputs");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_argument(outputs[i].scalar_type() == inputs[i].scalar_type(), kTitle, "output and input differ in dtype");
    check_argument(outputs[i].numel() == inputs[i].numel() * size_, kTitle, "the output has ", outputs[i].numel(),
                   " elements; ", size_, " ranks with ", inputs[i].numel(), " each need ", inputs[i].numel() * size_);
    value_or_throw(check_sendable(inputs[i]));
    value_or_throw(check_sendable(outputs[i]));
  }
  auto work = new_work(c10d::OpType::_ALLGATHER_BASE, "muster:all_gather_into_tensor", inputs, outputs);
  return start(work, queue_parts([&](Parts& parts) {
                 for (size_t i = 0; i < inputs.size(); ++i) {
                   gather_to_tensor(*work, parts, outputs[i], inputs[i], call(options.timeout, options.asyncOp));
                 }
               }));
}

c10::intrusive_ptr<c10d::Work> TorchBackend::barrier(const c10d::BarrierOptions& options) {
  auto work = new_work(c10d::OpType::BARRIER, "muster:barrier", {}, {});
  return start(work, {group_->barrier(call(options.timeout, options.asyncOp))});
}

c10d::ErrorType TorchBackend::getError() {
  const Result<> status = group_->status();
  if (status) return c10d::ErrorType::SUCCESS;
  switch (status.error().code) {
    case ErrorCode::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case ErrorCode::kPeerLost:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

void TorchBackend::abort() { group_->abort({ErrorCode::kAborted, "the process group was aborted by its user", rank_}); }

void TorchBackend::shutdown() {
  // The other ranks may be waiting for what this one has begun and not waited for; but nobody waits long to end.
  constexpr std::chrono::seconds kGrace(10);
  if (getpid() != process_ || pending_->drain(kGrace)) return;
  group_->abort({ErrorCode::kAborted, "the process group was shut down with operations pending", rank_});
  pending_->drain(kGrace);
}

}  // namespace muster
