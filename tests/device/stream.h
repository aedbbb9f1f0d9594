#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device/stream_handle.h"

namespace muster::device_double {

/// How long each kernel waits before it runs. A program that does not wait for a stream where it must then reads old
/// values. For the whole process, 0 at first.
void set_kernel_delay(std::chrono::milliseconds delay);

class Graph;

/// CUDA's modes. While a graph captures in the global mode, no thread in that mode may ask or wait for an event.
enum class CaptureMode { kGlobal, kThreadLocal, kRelaxed };
/// Sets the mode of the calling thread, at first the global one. Returns the one before.
CaptureMode exchange_capture_mode(CaptureMode mode);

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
  /// These two throw while the stream captures, as CUDA's do.
  bool idle();
  void synchronize();
  /// The graph that gets what the stream is given; null: the stream runs it.
  Graph* graph();

 private:
  friend class Graph;
  void set_graph(Graph* graph);
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;  ///< the first one runs
  Graph* graph_ = nullptr;
  std::thread thread_;  ///< last: it uses the others
};

/// The stream of a device, by its number: 0 is the default stream.
Stream& stream(int device, int64_t number);
int64_t new_stream_number();
/// Waits for all streams of the device.
void synchronize_device(int device);

/// What streams were given while they captured. It runs in that order, on one stream. Not thread-safe.
class Graph {
 public:
  ~Graph();
  /// Captures the stream, and each stream that waits for an event of a captured one.
  void begin(Stream& stream, CaptureMode mode = CaptureMode::kThreadLocal);
  /// Throws if a thread has asked for an event that it must not ask for now.
  void end();
  void replay(Stream& stream);
  /// Runs once the graph is gone: memory that it uses stays allocated until then.
  void at_end(std::function<void()> task) { at_end_.push_back(std::move(task)); }

 private:
  friend class Stream;
  friend class Event;
  void add(Stream& stream);
  void release_streams();
  CaptureMode mode_ = CaptureMode::kThreadLocal;
  std::vector<Stream*> streams_;
  std::vector<std::function<void()>> tasks_, at_end_;
};

/// A point in a stream. Of a stream that captures, only that stream and others of its graph can wait for it.
class Event {
 public:
  void record(Stream& stream);
  /// The stream goes on once the event is reached as it was recorded last. An event of a graph adds the stream to it.
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
    Graph* graph = nullptr;  ///< of its stream; then it is never reached
    std::chrono::steady_clock::time_point time;
    void wait();
  };
  std::shared_ptr<Point> point_;
};

}  // namespace muster::device_double
