#include "muster/torch/rpc/process_group_frames.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace muster::rpc {
namespace {

constexpr Duration kMinPoll = 10us, kMaxPoll = 1ms;

at::Tensor message(size_t bytes) { return at::empty(static_cast<int64_t>(bytes), at::kByte); }

}  // namespace

void FrameExchange::send(const Frame& frame) const {
  at::Tensor first = message(kFrameBytes);
  auto* const to = first.data_ptr<uint8_t>();
  const size_t inline_bytes = std::min(frame.bytes.size(), kInlineBytes);
  std::memcpy(to, &frame.header, sizeof(FrameHeader));
  std::copy_n(frame.bytes.begin(), inline_bytes, to + sizeof(FrameHeader));
  send(first);
  if (frame.bytes.size() == inline_bytes) return;
  at::Tensor rest = message(frame.bytes.size() - inline_bytes);
  std::copy(frame.bytes.begin() + static_cast<std::ptrdiff_t>(inline_bytes), frame.bytes.end(),
            rest.data_ptr<uint8_t>());
  send(rest);
}

Frame FrameExchange::receive() const {
  at::Tensor first = message(kFrameBytes);
  receive(first);
  Frame frame;
  const auto* const from = first.data_ptr<uint8_t>();
  std::memcpy(&frame.header, from, sizeof(FrameHeader));
  if (frame.header.bytes > kMaxChunk) throw std::runtime_error("a frame is too long");
  const size_t inline_bytes = std::min<size_t>(frame.header.bytes, kInlineBytes);
  frame.bytes.resize(frame.header.bytes);
  std::copy_n(from + sizeof(FrameHeader), inline_bytes, frame.bytes.begin());
  if (frame.bytes.size() == inline_bytes) return frame;
  at::Tensor rest = message(frame.bytes.size() - inline_bytes);
  receive(rest);
  std::copy_n(rest.data_ptr<uint8_t>(), rest.numel(), frame.bytes.begin() + static_cast<std::ptrdiff_t>(inline_bytes));
  return frame;
}

void FrameExchange::send(at::Tensor& tensor) const {
  std::vector<at::Tensor> tensors{tensor};
  wait(backend_->send(tensors, peer_, tag_));
}

void FrameExchange::receive(at::Tensor& tensor) const {
  std::vector<at::Tensor> tensors{tensor};
  wait(backend_->recv(tensors, peer_, tag_));
}

/// c10d's MPI backend waits with a lock that all its operations take, so nothing else would move meanwhile.
void FrameExchange::wait(const c10::intrusive_ptr<c10d::Work>& work) const {
  for (Duration pause = kMinPoll; polls_ && !work->isCompleted(); pause = std::min(2 * pause, kMaxPoll)) {
    std::this_thread::sleep_for(pause);  // tidy: allow(sleep) the backend tells nobody when a message arrives
  }
  if (!work->wait()) throw std::runtime_error("the backend has ended the operation");
}

}  // namespace muster::rpc
