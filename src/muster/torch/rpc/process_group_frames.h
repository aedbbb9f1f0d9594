#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "muster/base/bytes.h"
#include "muster/base/clock.h"

/// The grammar. Two ranks send each other frames, in order, each in one message of kFrameBytes, and the bytes that do
/// not fit there in a second message.
///
///   frame = header (FrameHeader), up to kInlineBytes bytes
///
/// A stream is one connection. Either end may open streams, so a stream is known by its opener and its number.
namespace muster::rpc {

inline constexpr size_t kFrameBytes = 1024;
inline constexpr size_t kMaxChunk = size_t{1} << 20;
/// The most bytes that wait to be sent to a rank, or to be written to the sockets of its streams.
inline constexpr size_t kMaxWaiting = 4 * kMaxChunk;

enum class FrameKind : uint8_t {
  kOpen = 1,   ///< a new stream
  kData = 2,   ///< bytes of a stream
  kClose = 3,  ///< the end of a stream
  kAlive = 4,  ///< nothing: a backend may end a receive that waits for too long
  kBye = 5,    ///< the last frame. The receiver answers it with its own last frame
};

struct FrameHeader {
  FrameKind kind = FrameKind::kAlive;
  uint8_t opened_here = 0;  ///< the sender has opened the stream
  uint16_t unused = 0;
  uint32_t stream = 0;
  uint64_t bytes = 0;
};
inline constexpr size_t kInlineBytes = kFrameBytes - sizeof(FrameHeader);

struct Frame {
  FrameHeader header;
  Bytes bytes;
};

/// Sends and receives frames. Blocks. The first error of the backend is final, and thrown.
class FrameExchange {
 public:
  FrameExchange(c10::intrusive_ptr<c10d::Backend> backend, int peer, int tag)
      : backend_(std::move(backend)), peer_(peer), tag_(tag), polls_(backend_->getBackendName() == "mpi") {}

  void send(const Frame& frame) const;
  Frame receive() const;

 private:
  void send(at::Tensor& tensor) const;
  void receive(at::Tensor& tensor) const;
  void wait(const c10::intrusive_ptr<c10d::Work>& work) const;

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const int peer_, tag_;
  const bool polls_;
};

/// Frames that wait between the thread of the sockets and the threads of a rank. Thread-safe.
class FrameQueue {
 public:
  void push(Frame frame) {
    const std::lock_guard lock(mutex_);
    bytes_ += frame.bytes.size();
    frames_.push_back(std::move(frame));
    changed_.notify_all();
  }
  /// Empty if none comes within `patience`.
  std::optional<Frame> pop(Duration patience) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, patience, [this] { return !frames_.empty(); })) return std::nullopt;
    Frame frame = std::move(frames_.front());
    frames_.pop_front();
    return frame;
  }
  /// The bytes of a frame count until they are released. Returns true if there was no room, and now is some.
  bool release(size_t bytes) {
    const std::lock_guard lock(mutex_);
    const bool full = bytes_ >= kMaxWaiting;
    bytes_ -= bytes;
    changed_.notify_all();
    return full && bytes_ < kMaxWaiting;
  }
  bool is_full() {
    const std::lock_guard lock(mutex_);
    return bytes_ >= kMaxWaiting;
  }
  void wait_for_room() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return bytes_ < kMaxWaiting || closed_; });
  }
  /// Nobody takes frames any more.
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Frame> frames_;
  size_t bytes_ = 0;
  bool closed_ = false;
};

}  // namespace muster::rpc
