#include "muster/torch/c10d/tensor_request.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "muster/torch/c10d/arguments.h"
#include "muster/torch/c10d/device/device_group.h"
#include "muster/torch/c10d/device/staged_copies.h"
#include "muster/torch/c10d/device/staging.h"
#include "muster/torch/exception.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

using Ranges = std::vector<std::pair<const uint8_t*, const uint8_t*>>;

/// The memory of a view, sorted by address.
Ranges ranges_of(const BufferView& view) {
  Ranges ranges;
  view.visit(0, view.bytes(), [&](const uint8_t* data, size_t bytes) { ranges.emplace_back(data, data + bytes); });
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

bool overlap(const BufferView& a, const BufferView& b) {
  if (a.bytes() == 0 || b.bytes() == 0) return false;
  if (a.contiguous() && b.contiguous()) return a.data() < b.data() + b.bytes() && b.data() < a.data() + a.bytes();
  const Ranges first = ranges_of(a);
  const Ranges second = ranges_of(b);
  for (size_t i = 0, j = 0; i < first.size() && j < second.size();) {
    if (first[i].first < second[j].second && second[j].first < first[i].second) return true;
    first[i].second < second[j].second ? ++i : ++j;
  }
  return false;
}

/// True if the smaller buffer is the block of the larger one at byte `offset`.
bool is_block(const BufferView& a, const BufferView& b, size_t offset) {
  const BufferView &part = a.bytes() <= b.bytes() ? a : b, &whole = &part == &a ? b : a;
  if (!part.contiguous() || part.bytes() == 0 || offset >= whole.bytes()) return false;
  const Segment block = whole.at(offset, part.bytes());
  return block.data == part.data() && block.bytes == part.bytes();
}

/// copy_(), which torch lacks for integers of fewer than eight bits.
void copy_elements(const at::Tensor& to, const at::Tensor& from) {
  const auto dtype = dtype_of(to.scalar_type());
  if (dtype && *dtype == Dtype::kBits8) {
    to.view(at::kByte).copy_(from.view(at::kByte));
  } else {
    to.copy_(from);
  }
}

}  // namespace

bool TensorRequest::share_memory(const std::vector<at::Tensor>& tensors) {
  Ranges ranges;
  for (const at::Tensor& tensor : tensors) {
    const auto* data = static_cast<const uint8_t*>(tensor.const_data_ptr());
    if (tensor.nbytes() > 0) ranges.emplace_back(data, data + tensor.nbytes());
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second) return true;
  }
  return false;
}

TensorRequest::TensorRequest(c10d::OpType type, const char* title, bool async)
    : type(type), title(title), async(async) {}
TensorRequest::TensorRequest(TensorRequest&&) noexcept = default;
TensorRequest::~TensorRequest() = default;

/// For a tensor on a device, or beside one. True if the operation takes the tensor's own memory, false if it takes
/// memory of the host instead. in_one_piece: the tensor is contiguous, and is not one of a list.
bool TensorRequest::choose_memory(const at::Tensor& tensor, bool in_one_piece) {
  if (!tensor.is_cpu() && device_group == nullptr && device_groups != nullptr) {
    device_group = device_groups->for_device(tensor.device());
    check_argument(device_group == nullptr || !uses_host_, title, "some tensors are on the CPU and some on ",
                   tensor.device(), ": one call over NCCL takes tensors of one device");
  }
  if (device_group == nullptr) {
    check_argument(tensor.is_cpu() || !is_capturing(tensor.device()), title,
                   "a graph cannot capture it, because tensors on ", tensor.device(),
                   " go through the host, not over NCCL");
    if (in_one_piece && can_be_moved(tensor)) {
      wait_for_stream(tensor.device());
      return true;
    }
    uses_host_ = true;
    return false;
  }
  check_argument(tensor.device() == device_group->device(), title, "this group's collectives run on ",
                 device_group->device(), ", where its first one ran; this tensor is on ", tensor.device(),
                 ": move it there, or make another process group");
  return true;
}

/// True if the group of the host takes the memory of this tensor, which is on a device.
bool TensorRequest::can_be_moved(const at::Tensor& tensor) const {
  using c10d::OpType;
  switch (type) {
    case OpType::BROADCAST:
    case OpType::ALLGATHER:
    case OpType::ALLGATHER_COALESCED:
    case OpType::_ALLGATHER_BASE:
    case OpType::GATHER:
    case OpType::SCATTER:
    case OpType::ALLTOALL:
    case OpType::ALLTOALL_BASE:
    case OpType::SEND:
    case OpType::RECV:
    case OpType::RECVANYSOURCE:
      break;
    default:
      return false;  // it reduces
  }
  // A coalescing block begins later: kernels that the program launches meanwhile may write the memory.
  if (tensor.is_cpu() || host_group == nullptr || block_guard) return false;
  const c10::Device device = tensor.device();
  return host_group->takes_device_memory(c10::DeviceTypeName(device.type(), /*lower_case=*/true), device.index(),
                                         [type = device.type()](int index) {
                                           return exchange_device({type, static_cast<c10::DeviceIndex>(index)});
                                         });
}

BufferView TensorRequest::view(const at::Tensor& tensor, Use use, ListRole role) {
  const Dtype dtype = value_or_throw(check_dense(tensor));
  const bool on_host = tensor.is_cpu() && device_group == nullptr;
  uses_host_ |= on_host;
  const bool is_usable = role != ListRole::kWithCopies && is_plain(tensor);
  const bool own_memory = on_host || choose_memory(tensor, is_usable && role == ListRole::kNone);
  const auto view_all = [dtype](const at::Tensor& plain) {
    return BufferView(plain.data_ptr(), static_cast<size_t>(plain.numel()), dtype);
  };
  if (own_memory && is_usable) {
    if (async || !tensor.is_cpu()) keep_alive_.push_back(tensor);
    return view_all(tensor);
  }
  const at::NoGradGuard no_grad;
  const at::Tensor plain = own_memory
                               ? at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous))
                               : host_buffer(tensor);
  if (use != Use::kWrite) copy_elements(plain, tensor);
  keep_alive_.push_back(plain);
  if (use != Use::kRead) copy_at_end(tensor, plain);
  return view_all(plain);
}

BufferView TensorRequest::in_place_by_pieces(const at::Tensor& tensor) {
  const Dtype dtype = value_or_throw(check_dense(tensor));
  const bool by_pieces = !tensor.is_cpu() && StagedCopies::is_worth_it(tensor) && !choose_memory(tensor, true);
  if (!by_pieces) return in_place(tensor);
  const at::NoGradGuard no_grad;
  const at::Tensor plain = host_buffer(tensor);
  staged_ = std::make_unique<StagedCopies>(tensor, plain);
  keep_alive_.push_back(plain);
  return {plain.data_ptr(), static_cast<size_t>(plain.numel()), dtype};
}

void TensorRequest::copy_at_end(const at::Tensor& to, const at::Tensor& from) {
  const bool staged = !to.is_cpu() && device_group == nullptr;
  copies_.push_back({to, from, staged ? std::optional(current_stream(to.device())) : std::nullopt});
}

BufferView TensorRequest::view(const std::vector<at::Tensor>& tensors, Use use) {
  if (tensors.size() == 1) return view(tensors.front(), use);
  // Outputs that share memory are received into separate copies. Where they overlap, the last tensor's copy remains.
  const bool copies = use != Use::kRead && share_memory(tensors);
  const ListRole role = copies ? ListRole::kWithCopies : ListRole::kMember;
  std::vector<Segment> segments;
  segments.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const BufferView here = view(tensor, use, role);
    if (here.bytes() == 0) continue;
    if (!segments.empty() && static_cast<uint8_t*>(segments.back().data) + segments.back().bytes == here.data()) {
      segments.back().bytes += here.bytes();  // adjacent, such as consecutive rows of one tensor
    } else {
      segments.push_back({here.data(), here.bytes()});
    }
  }
  const Dtype dtype = tensors.empty() ? Dtype::kUint8 : value_or_throw(dtype_of(tensors.front().scalar_type()));
  return {std::move(segments), dtype};
}

BufferView TensorRequest::copy_if_overlapping(BufferView input, const BufferView& output,
                                              std::optional<size_t> own_offset) {
  if (own_offset && is_block(input, output, *own_offset)) return input;
  if (!overlap(input, output)) return input;
  check_argument(device_group == nullptr || input.contiguous(), title, "a list of inputs overlaps the output");
  const auto owner = std::ranges::find_if(keep_alive_, [&](const at::Tensor& tensor) {
    return input.contiguous() && !tensor.is_cpu() && tensor.const_data_ptr() == input.data();
  });
  at::Tensor copy;
  if (owner == keep_alive_.end()) {
    copy = at::empty({static_cast<int64_t>(input.bytes())}, at::kByte);
    input.read(0, copy.mutable_data_ptr(), input.bytes());
  } else {
    copy = bytes_at(input.data(), input.bytes(), owner->device()).clone();
    if (device_group == nullptr) wait_for_stream(owner->device());
  }
  keep_alive_.push_back(copy);
  return {copy.mutable_data_ptr(), input.count(), input.dtype()};
}

Operation& TensorRequest::add_disjoint(Collective collective, BufferView input, BufferView output,
                                       std::optional<size_t> own_offset) {
  input = copy_if_overlapping(std::move(input), output, own_offset);
  return add(collective, std::move(input), std::move(output));
}

Operation& TensorRequest::add(Collective collective, BufferView input, BufferView output) {
  Operation& operation = operations.emplace_back();
  operation.call.collective = collective;
  operation.staging = staged_.get();
  operation.input = std::move(input);
  operation.output = std::move(output);
  return operation;
}

void TensorRequest::join(TensorRequest other) {
  check_argument(!(device_group != nullptr && other.uses_host_) && !(uses_host_ && other.device_group != nullptr),
                 title, "the calls of a coalescing block over NCCL take tensors of one device");
  uses_host_ |= other.uses_host_;
  if (other.device_group != nullptr) device_group = other.device_group;
  const auto append = [](auto& to, auto& from) {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  };
  append(outputs, other.outputs);
  append(operations, other.operations);
  append(messages, other.messages);
  append(keep_alive_, other.keep_alive_);
  append(copies_, other.copies_);
}

muster::Work TensorRequest::submit(Group& group, const CallOptions& options) {
  if (operations.size() == 1) return group.submit(std::move(operations.front()), options);
  return group.submit(
      std::vector<Operation>(std::make_move_iterator(operations.begin()), std::make_move_iterator(operations.end())),
      options);
}

void TensorRequest::copy_back() {
  if (staged_) staged_->finish();
  if (copies_.empty()) return;
  const at::NoGradGuard no_grad;
  // A tensor that was made in inference mode can be written only in that mode, and this may be another thread.
  const c10::InferenceMode inference;
  for (const Copy& copy : copies_) {
    std::optional<RelaxedCaptureMode> relaxed;
    std::optional<StreamScope> in_order;
    if (copy.stream) {
      relaxed.emplace(copy.stream->device());
      in_order.emplace(*copy.stream);
    }
    copy_elements(copy.to, copy.from);
  }
}

void TensorRequest::record_on(const c10::Stream& stream) const {
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  const auto record = [&](const at::Tensor& tensor) {
    guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  };
  for (const at::Tensor& each : keep_alive_) record(each);
  for (const Copy& each : copies_) record(each.to);
}

void TensorRequest::release() {
  staged_.reset();  // waits for copies from and to the memory
  copies_.clear();
  keep_alive_.clear();
}

}  // namespace muster
