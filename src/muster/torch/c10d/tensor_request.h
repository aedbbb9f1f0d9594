#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "muster/group/group.h"

namespace muster {

struct DeviceGroup;
class LazyDeviceGroup;
class StagedCopies;

/// A c10d call that is submitted to the core: its operations, the tensors that they use, and the results that are
/// copied back at the end. The core needs plain memory of the host (tensor.h), so a request replaces other tensors by
/// copies. It also copies inputs that overlap the output.
///
/// If the ranks have a group on the device, it gets the memory of a device's tensors. So does a group of the host that
/// can move such memory (Group::takes_device_memory()). Otherwise such tensors are copied to the host, in the order of
/// the stream that is current at the call, and the result is there for all streams once the call has ended.
class TensorRequest {
 public:
  /// Profilers show `title`, which must be static. If `async`, the request keeps the tensors alive, because the caller
  /// may drop them before the end.
  TensorRequest(c10d::OpType type, const char* title, bool async);
  TensorRequest(TensorRequest&&) noexcept;
  ~TensorRequest();

  c10d::OpType type;
  const char* title;
  bool async;
  std::vector<at::Tensor> outputs;            ///< returned by Work::result() and by futures
  c10::SmallVector<Operation, 1> operations;  ///< rarely more than one
  std::vector<Message> messages;
  const Group* host_group = nullptr;         ///< null: it takes no memory of a device
  LazyDeviceGroup* device_groups = nullptr;  ///< null: tensors on a device go through the host
  DeviceGroup* device_group = nullptr;       ///< runs the operations, if the tensors are on its device
  /// In a coalescing block: the deleter cancels the block if the request is destroyed before it has joined the block.
  std::shared_ptr<void> block_guard;

  // The memory of a tensor, or of several that are concatenated. Throws for a tensor that cannot be sent.
  /// Memory that is only read.
  template <class Tensors>
  BufferView read(const Tensors& tensors) {
    return view(tensors, Use::kRead);
  }
  /// Memory that is read and written.
  template <class Tensors>
  BufferView in_place(const Tensors& tensors) {
    return view(tensors, Use::kInPlace);
  }
  /// The same for the tensor of an all_reduce. A large one on a device is copied in pieces while the operation runs.
  BufferView in_place_by_pieces(const at::Tensor& tensor);
  /// Memory that is only written: its old content is lost.
  template <class Tensors>
  BufferView write(const Tensors& tensors) {
    return view(tensors, Use::kWrite);
  }

  /// Returns `input`, or a copy of it if it shares memory with `output`. One overlap is allowed: the smaller buffer is
  /// the block of the larger one at byte `own_offset`, because a rank's own part may be in place.
  BufferView copy_if_overlapping(BufferView input, const BufferView& output,
                                 std::optional<size_t> own_offset = std::nullopt);

  /// True if tensors share memory, so that each needs memory of its own.
  static bool share_memory(const std::vector<at::Tensor>& tensors);

  /// Copies `from` to `to` once the operation has succeeded.
  void copy_at_end(const at::Tensor& to, const at::Tensor& from);

  /// Adds an operation. The caller fills in the other fields.
  Operation& add(Collective collective, BufferView input, BufferView output);
  /// The same, after copy_if_overlapping().
  Operation& add_disjoint(Collective collective, BufferView input, BufferView output,
                          std::optional<size_t> own_offset = std::nullopt);
  /// Adds the operations of another call, which then complete together with this one.
  void join(TensorRequest other);

  /// Submits the operations, not the messages.
  muster::Work submit(Group& group, const CallOptions& options);
  /// Copies the results to the caller's tensors, once the operation has succeeded.
  void copy_back();
  /// Tells the allocator that `stream` uses the tensors, so that release() need not wait for the stream.
  void record_on(const c10::Stream& stream) const;
  /// Drops all copies and references, once the operation has ended.
  void release();

 private:
  enum class Use { kRead, kInPlace, kWrite };
  /// Of a tensor: not in a list, in a list, or in a list whose tensors share memory, so that each is copied.
  enum class ListRole { kNone, kMember, kWithCopies };
  bool choose_memory(const at::Tensor& tensor, bool in_one_piece);
  bool can_be_moved(const at::Tensor& tensor) const;
  BufferView view(const at::Tensor& tensor, Use use, ListRole role = ListRole::kNone);
  BufferView view(const std::vector<at::Tensor>& tensors, Use use);

  struct Copy {
    at::Tensor to, from;
    std::optional<c10::Stream> stream;  ///< of a device: the copy is in this stream's order
  };
  bool uses_host_ = false;  ///< memory of the host has been taken
  std::vector<at::Tensor> keep_alive_;
  std::vector<Copy> copies_;
  std::unique_ptr<StagedCopies> staged_;
};

}  // namespace muster
