#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <vector>

#include "muster/collective/staging.h"

namespace muster {

/// The copies of a large tensor on a device, in pieces, so that those of one piece overlap with the collective on
/// others. Inputs are copied in the order of the stream that is current in the constructor, and results on a stream of
/// their own. Not thread-safe.
class StagedCopies final : public Staging {
 public:
  /// False for tensors that are small, or that are not in one piece of memory.
  static bool is_worth_it(const at::Tensor& on_device);
  /// Begins to copy the tensor to `on_host`, which has its shape.
  StagedCopies(at::Tensor on_device, at::Tensor on_host);
  /// Waits for the copies, because they use the memory.
  ~StagedCopies() override;

  Result<> wait_for_input(size_t end, const Deadline& deadline) override;
  Result<> output_is_complete(size_t end) override;
  /// Copies the rest of the results, and waits for all of them. Throws an error of the device.
  void finish();

 private:
  size_t pieces() const { return copied_in_.size(); }
  at::Tensor piece_of(const at::Tensor& tensor, size_t index) const;
  void copy_out(size_t first_pieces);

  const at::Tensor on_device_, on_host_;  ///< flat
  const c10::Stream out_;
  std::vector<c10::Event> copied_in_;  ///< by piece
  size_t copied_out_ = 0;              ///< pieces whose results are on their way to the device
};

}  // namespace muster
