#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "device/stream_handle.h"

namespace muster::device_double {

/// How long each kernel waits before it runs. A program that does not wait for a stream where it must then reads old
/// values. For the whole process, 0 at first.
void set_kernel_delay(std::chrono::milliseconds delay);

/// A queue of kernels with a thread that runs them in order. Lives for ever. Thread-safe.
class Stream : public StreamHandle {
 public:
  Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// A kernel, which the delay precedes.
  void launch(std::function<void()> kernel);
  /// The same without a delay, for events.
  void enqueue(std::function<void()> task);
  bool idle();
  void synchronize();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;  ///< the first one runs
  std::thread thread_;                       ///< last: it uses the others
};

/// The stream of a device, by its number: 0 is the default stream.
Stream& stream(int device, int64_t number);
int64_t new_stream_number();
/// Waits for all streams of the device.
void synchronize_device(int device);

/// A point in a stream.
class Event {
 public:
  void record(Stream& stream);
  /// The stream goes on once the event is reached as it was recorded last.
  void block(Stream& stream);
  bool reached();
  void synchronize();
  /// Milliseconds since an earlier event; both are reached.
  double since(Event& earlier);

 private:
  struct Point {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;
    std::chrono::steady_clock::time_point time;
    void wait();
  };
  std::shared_ptr<Point> point_;
};

}  // namespace muster::device_double
