#pragma once

#include <cstddef>
#include <memory>

#include "muster/nccl/library.h"

namespace muster::nccl {

/// What a group needs of the runtime of its device. The layer that has that runtime implements it, so this library
/// links none. Thread-safe. "The stream" is the one that is current for the calling thread.
class Device {
 public:
  /// A point in a stream.
  class Event {
   public:
    virtual ~Event() = default;
    virtual bool reached() = 0;
  };

  virtual ~Device() = default;
  /// Makes it the current device of the calling thread, which muster owns.
  virtual void make_current() = 0;
  virtual Stream stream() = 0;
  /// True while the stream's work becomes part of a graph, which runs later, instead of running.
  virtual bool capturing() = 0;
  /// The point that the stream has been given work up to.
  virtual std::unique_ptr<Event> record() = 0;
  /// Memory of the device for work on the stream. It may be released at once: its next use is after that work.
  virtual std::shared_ptr<void> allocate(size_t bytes) = 0;
  /// Copies memory of the device, on the stream.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
};

}  // namespace muster::nccl
