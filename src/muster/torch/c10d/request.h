#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "muster/collective/operation.h"

namespace muster {

/// One message of a request.
struct Message {
  BufferView data;
  Rank peer = 0;
  uint32_t tag = 0;
  bool send = true;
};

/// A call of c10d on its way to the core: what is asked of it, the tensors that this uses, and what is copied back in
/// the end. The core wants plain memory (tensor.h); this puts copies in the place of tensors that have none, and where
/// one may not lie in the memory of another.
class Request {
 public:
  /// `title` is what profilers show, and must live for ever. `async`: the caller may let go of the tensors before the
  /// end, so they are kept.
  Request(c10d::OpType type, const char* title, bool async) : type(type), title(title), async(async) {}

  c10d::OpType type;
  const char* title;
  bool async;
  std::vector<at::Tensor> outputs;            ///< what Work::result() and futures give
  c10::SmallVector<Operation, 1> operations;  ///< hardly ever more than one
  std::vector<Message> messages;
  /// Where the call is one of a coalescing block: what happens when this goes without having been added to it.
  std::shared_ptr<void> unless_added;

  /// The memory of a tensor that is only read. Throws for one that cannot be sent.
  BufferView read(const at::Tensor& tensor);
  /// The same of several, one behind the other.
  BufferView read(const std::vector<at::Tensor>& tensors);
  /// Memory that is read and written.
  BufferView in_place(const at::Tensor& tensor);
  BufferView in_place(const std::vector<at::Tensor>& tensors);
  /// Memory that is only written: its old content does not matter.
  BufferView write(const at::Tensor& tensor);
  BufferView write(const std::vector<at::Tensor>& tensors);

  /// `input`, or a copy if it shares memory with `output` and is not `allowed` to.
  BufferView apart(BufferView input, const BufferView& output, bool allowed = false);
  /// Whether `part` is the block of `whole` that begins at byte `offset`.
  static bool is_block(const BufferView& part, const BufferView& whole, size_t offset);

  /// Once all went well `to` gets what `from` has then.
  void copy_in_the_end(const at::Tensor& to, const at::Tensor& from) { copies_.emplace_back(to, from); }

  /// One more operation. What else it is, and counts, the caller fills in.
  Operation& add(Collective collective, BufferView input, BufferView output);
  /// Another call, to be done together with this one.
  void join(Request other);

  /// The results to where the caller wants them, once all went well.
  void copy_back();
  /// Lets go of what is needed no more once all is done.
  void release();

 private:
  enum class Use { kRead, kInPlace, kWrite };
  BufferView view(const at::Tensor& tensor, Use use, bool apart = false);
  BufferView view(const std::vector<at::Tensor>& tensors, Use use);

  std::vector<at::Tensor> keep_alive_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  ///< to, from
};

}  // namespace muster
