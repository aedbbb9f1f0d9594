#include "device/stream.h"

#include <atomic>
#include <map>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "device/memory.h"

namespace muster::device_double {
namespace {

std::atomic<int64_t> kernel_delay_ms = 0;

std::atomic<int> global_captures = 0;  ///< graphs that capture in the global mode
std::atomic<bool> disturbed = false;   ///< one of them has failed
thread_local CaptureMode thread_mode = CaptureMode::kGlobal;

void check_that_none_captures() {
  if (global_captures == 0 || thread_mode != CaptureMode::kGlobal) return;
  disturbed = true;
  throw std::logic_error("this thread must not ask for an event, because a graph captures in the global mode");
}

struct Streams {
  std::mutex mutex;
  std::map<std::pair<int, int64_t>, std::unique_ptr<Stream>> by_number;
  std::atomic<int64_t> next = 1;
};

Streams& streams() {
  static Streams& made = *new Streams;  // the threads never end
  return made;
}

}  // namespace

void set_kernel_delay(std::chrono::milliseconds delay) { kernel_delay_ms = delay.count(); }

CaptureMode exchange_capture_mode(CaptureMode mode) { return std::exchange(thread_mode, mode); }

Stream::Stream()
    : StreamHandle{[](StreamHandle* stream, void (*task)(void*), void* argument, void (*release)(void*)) {
                     const std::shared_ptr<void> owned(argument, release);
                     static_cast<Stream*>(stream)->launch([task, owned] { task(owned.get()); });
                   },
                   [](void* address) { return owns(address) ? host_address(address) : address; }},
      thread_([this] { run(); }) {}

void Stream::launch(std::function<void()> kernel) {
  enqueue([kernel = std::move(kernel), delay = std::chrono::milliseconds(kernel_delay_ms)] {
    std::this_thread::sleep_for(delay);  // tidy: allow(sleep) a kernel that takes a while
    kernel();
  });
}

void Stream::enqueue(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  if (graph_ != nullptr) return graph_->tasks_.push_back(std::move(task));
  queue_.push_back(std::move(task));
  changed_.notify_all();
}

Graph* Stream::graph() {
  const std::lock_guard lock(mutex_);
  return graph_;
}

void Stream::set_graph(Graph* graph) {
  const std::lock_guard lock(mutex_);
  graph_ = graph;
}

bool Stream::idle() {
  const std::lock_guard lock(mutex_);
  if (graph_ != nullptr) throw std::logic_error("a stream that captures cannot be queried");
  return queue_.empty();
}

void Stream::synchronize() {
  std::unique_lock lock(mutex_);
  if (graph_ != nullptr) throw std::logic_error("a stream that captures cannot be waited for");
  changed_.wait(lock, [this] { return queue_.empty(); });
}

void Stream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !queue_.empty(); });
    const auto task = queue_.front();
    lock.unlock();
    task();
    lock.lock();
    queue_.pop_front();
    changed_.notify_all();
  }
}

Stream& stream(int device, int64_t number) {
  const std::lock_guard lock(streams().mutex);
  auto& found = streams().by_number[{device, number}];
  if (!found) found = std::make_unique<Stream>();
  return *found;
}

int64_t new_stream_number() { return streams().next++; }

void synchronize_device(int device) {
  std::vector<Stream*> all;
  {
    const std::lock_guard lock(streams().mutex);
    for (auto& [key, each] : streams().by_number) {
      if (key.first == device) all.push_back(each.get());
    }
  }
  for (Stream* each : all) each->synchronize();
}

void Graph::begin(Stream& stream, CaptureMode mode) {
  mode_ = mode;
  if (mode == CaptureMode::kGlobal && global_captures++ == 0) disturbed = false;
  add(stream);
}

void Graph::add(Stream& stream) {
  stream.set_graph(this);
  streams_.push_back(&stream);
}

void Graph::end() {
  const bool failed = mode_ == CaptureMode::kGlobal && disturbed;
  release_streams();
  if (failed) throw std::logic_error("the capture has failed, because a thread has asked for an event meanwhile");
}

void Graph::release_streams() {
  if (std::exchange(mode_, CaptureMode::kThreadLocal) == CaptureMode::kGlobal) --global_captures;
  for (Stream* each : std::exchange(streams_, {})) each->set_graph(nullptr);
}

void Graph::replay(Stream& stream) {
  for (const auto& each : tasks_) stream.enqueue(each);
}

Graph::~Graph() {
  release_streams();
  for (const auto& each : at_end_) each();
}

void Event::Point::wait() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [this] { return reached; });
}

void Event::record(Stream& stream) {
  point_ = std::make_shared<Point>();
  point_->graph = stream.graph();
  if (point_->graph != nullptr) return;
  stream.enqueue([point = point_] {
    const std::lock_guard lock(point->mutex);
    point->reached = true;
    point->time = std::chrono::steady_clock::now();
    point->changed.notify_all();
  });
}

void Event::block(Stream& stream) {
  if (!point_) return;
  Graph* const graph = stream.graph();
  if (graph == point_->graph) {
    if (graph == nullptr) stream.enqueue([point = point_] { point->wait(); });
  } else if (graph == nullptr) {
    point_->graph->add(stream);
  } else {
    throw std::logic_error("a stream that captures cannot wait for an event of before");
  }
}

bool Event::reached() {
  check_that_none_captures();
  if (!point_) return true;
  if (point_->graph != nullptr) throw std::logic_error("an event of a graph cannot be queried");
  const std::lock_guard lock(point_->mutex);
  return point_->reached;
}

void Event::synchronize() {
  check_that_none_captures();
  if (point_ && point_->graph != nullptr) throw std::logic_error("an event of a graph cannot be waited for");
  if (point_) point_->wait();
}

double Event::since(Event& earlier) {
  return std::chrono::duration<double, std::milli>(point_->time - earlier.point_->time).count();
}

}  // namespace muster::device_double
