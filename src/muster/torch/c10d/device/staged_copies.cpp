#include "muster/torch/c10d/device/staged_copies.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "muster/base/wait_policy.h"
#include "muster/torch/c10d/device/staging.h"

namespace muster {
namespace {

constexpr int64_t kPieceBytes = 4 << 20;
constexpr int64_t kMinPieces = 4;

int64_t piece_elements(const at::Tensor& tensor) { return kPieceBytes / tensor.element_size(); }

template <class Body>
Result<> without_exceptions(const Body& body) {
  try {
    body();
    return {};
  } catch (const std::exception& error) {
    return fail(ErrorCode::kIo, std::string("a copy from or to a device failed: ") + error.what());
  }
}

}  // namespace

bool StagedCopies::is_worth_it(const at::Tensor& on_device) {
  return on_device.is_contiguous() && on_device.nbytes() >= static_cast<size_t>(kMinPieces * kPieceBytes);
}

StagedCopies::StagedCopies(at::Tensor on_device, at::Tensor on_host)
    : on_device_(on_device.view({-1})),
      on_host_(on_host.view({-1})),
      out_(c10::impl::VirtualGuardImpl(on_device.device().type()).getStreamFromGlobalPool(on_device.device())) {
  const c10::Stream stream = current_stream(on_device.device());
  const int64_t length = piece_elements(on_device_);
  for (int64_t begin = 0; begin < on_device_.numel(); begin += length) {
    const size_t index = copied_in_.size();
    copied_in_.emplace_back(stream.device_type());
    piece_of(on_host_, index).copy_(piece_of(on_device_, index), /*non_blocking=*/true);
    copied_in_.back().record(stream);
  }
}

StagedCopies::~StagedCopies() {
  (void)without_exceptions([this] {
    const RelaxedCaptureMode relaxed(out_.device());
    copied_in_.back().synchronize();
    out_.synchronize();
  });
}

at::Tensor StagedCopies::piece_of(const at::Tensor& tensor, size_t index) const {
  const int64_t length = piece_elements(tensor), begin = static_cast<int64_t>(index) * length;
  return tensor.narrow(0, begin, std::min(length, tensor.numel() - begin));
}

Result<> StagedCopies::wait_for_input(size_t end, const Deadline& deadline) {
  if (end == 0) return {};
  const size_t last = std::min((end - 1) / kPieceBytes, pieces() - 1);
  bool copied = false;
  MUSTER_TRY(without_exceptions([&] {
    const RelaxedCaptureMode relaxed(out_.device());
    PollWait wait(kMessagePolls);
    while (!(copied = copied_in_[last].query()) && !deadline.passed()) {
      if (!wait.idle()) spin_pause();
    }
  }));
  if (copied) return {};
  return fail(ErrorCode::kTimeout, "the device has not done what comes before the call, in its stream, in time");
}

Result<> StagedCopies::output_is_complete(size_t end) {
  const size_t whole = end >= on_host_.nbytes() ? pieces() : end / kPieceBytes;
  if (whole <= copied_out_) return {};
  return without_exceptions([&] { copy_out(whole); });
}

void StagedCopies::copy_out(size_t first_pieces) {
  const RelaxedCaptureMode relaxed(out_.device());
  const c10::DeviceGuard here(out_.device());
  const StreamScope scope(out_);
  const at::NoGradGuard no_grad;
  const c10::InferenceMode inference;  // a tensor that was made in it can be written only there
  for (; copied_out_ < first_pieces; ++copied_out_) {
    copied_in_[copied_out_].block(out_);
    piece_of(on_device_, copied_out_).copy_(piece_of(on_host_, copied_out_), /*non_blocking=*/true);
  }
}

void StagedCopies::finish() {
  copy_out(pieces());
  const RelaxedCaptureMode relaxed(out_.device());
  out_.synchronize();
}

}  // namespace muster
