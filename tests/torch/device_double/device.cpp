// The device itself: its guard, its hooks, and its memory.
#include "device.h"

#include <ATen/core/GraphImplInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_set>

#include "device/memory.h"

namespace muster::device_double {
namespace {

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<int64_t, kDevices> current_streams{};

c10::Device device(c10::DeviceIndex index) { return {kType, index < 0 ? current_device : index}; }
c10::Stream stream_at(c10::Device where, int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, device(where.index()), number);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device next) const override {
    const c10::Device before = getDevice();
    setDevice(next);
    return before;
  }
  c10::Device getDevice() const override { return device(current_device); }
  void setDevice(c10::Device next) const override {
    TORCH_CHECK(next.index() < kDevices, "the double has ", kDevices, " devices, not ", next);
    uncheckedSetDevice(next);
  }
  void uncheckedSetDevice(c10::Device next) const noexcept override {
    if (next.index() >= 0) current_device = next.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device where) const override { return current_stream(where); }
  c10::Stream getDefaultStream(c10::Device where) const override { return stream_at(where, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device where, bool) const override { return getNewStream(where, 0); }
  c10::Stream getNewStream(c10::Device where, int) const override { return stream_at(where, new_stream_number()); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = current_stream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream which) const override { return &queue_of(which); }
  bool queryStream(const c10::Stream& which) const override { return queue_of(which).idle(); }
  void synchronizeStream(const c10::Stream& which) const override { queue_of(which).synchronize(); }
  bool isStreamCapturing(const c10::Stream& which) const override { return queue_of(which).graph() != nullptr; }
  void synchronizeDevice(c10::DeviceIndex index) const override { synchronize_device(device(index).index()); }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& which, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->record(queue_of(which));
  }
  void block(void* event, const c10::Stream& which) const override {
    if (event != nullptr) static_cast<Event*>(event)->block(queue_of(which));
  }
  bool queryEvent(void* event) const override { return event == nullptr || static_cast<Event*>(event)->reached(); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) static_cast<Event*>(event)->synchronize();
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    return static_cast<Event*>(second)->since(*static_cast<Event*>(first));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& which) const override {
    record_on_stream(memory, which);
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index < 0 ? current_device : index);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  /// The content is lost: this is for FSDP, which frees memory and allocates it again.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::StorageImpl* const memory = storage.unsafeGetStorageImpl();
    memory->set_data_ptr(device_allocator()->allocate(bytes));
    memory->set_nbytes(bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

struct Block {
  void* address;
  c10::Stream allocated_on;
  std::unordered_set<c10::Stream> used_on;
};

void release_block(void* context) {
  Block* const block = static_cast<Block*>(context);
  Stream& owner = queue_of(block->allocated_on);
  if (Graph* const graph = owner.graph()) {
    graph->at_end([address = block->address] { release(address); });
    delete block;
    return;
  }
  for (const c10::Stream& each : block->used_on) {
    Event event;
    event.record(queue_of(each));
    event.block(owner);
  }
  owner.enqueue([address = block->address] { release(address); });
  delete block;
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device here = device(current_device);
    if (bytes == 0) return {nullptr, nullptr, nullptr, here};
    void* const address = device_double::allocate(bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "the double has no ", bytes, " bytes left");
    return {address, new Block{address, current_stream(here), {}}, &release_block, here};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(host_address(to), host_address(from), bytes);
  }
};

class TorchGraph final : public at::GraphImplInterface {
 public:
  explicit TorchGraph(at::GraphImplArgs) {}
  void capture_begin(at::MempoolId_t, at::GraphCaptureMode mode) override {
    reset();
    graph_ = std::make_unique<Graph>();
    const bool global = mode == at::GraphCaptureMode::Default || mode == at::GraphCaptureMode::Global;
    graph_->begin(queue_of(current_stream(device(-1))), global ? CaptureMode::kGlobal : CaptureMode::kThreadLocal);
  }
  void capture_end() override { graph_->end(); }
  void instantiate() override {}
  void replay() override { graph_->replay(queue_of(current_stream(device(-1)))); }
  void reset() override { graph_.reset(); }
  at::MempoolId_t pool() const override { return {0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  std::unique_ptr<Graph> graph_;
};

struct Pinned {
  std::mutex mutex;
  std::map<const void*, size_t> blocks;
  std::multimap<size_t, void*> free;  ///< kept for the next tensors, as real allocators do
};
Pinned& pinned() {
  static Pinned& made = *new Pinned;
  return made;
}

void release_pinned(void* address) {
  const std::lock_guard lock(pinned().mutex);
  const auto block = pinned().blocks.find(address);
  pinned().free.emplace(block->second, address);
  pinned().blocks.erase(block);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    const std::lock_guard lock(pinned().mutex);
    const auto kept = pinned().free.find(bytes);
    void* const address = kept != pinned().free.end() ? kept->second : std::malloc(bytes);
    TORCH_CHECK(address != nullptr, "the host has no ", bytes, " bytes left");
    if (kept != pinned().free.end()) pinned().free.erase(kept);
    pinned().blocks[address] = bytes;
    return {address, address, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceAllocator allocator;
PinnedAllocator allocator_of_pinned;
REGISTER_ALLOCATOR(kType, &allocator)

}  // namespace
}  // namespace muster::device_double

namespace at {
REGISTER_GRAPH_IMPL(SIMULATED, muster::device_double::TorchGraph)  // the device's name in tests/python/device_double.py
}  // namespace at

namespace muster::device_double {

c10::Stream current_stream(c10::Device where) {
  const c10::Device here = device(where.index());
  return stream_at(here, current_streams[here.index()]);
}

c10::Allocator* device_allocator() { return &allocator; }
c10::Allocator* pinned_allocator() { return &allocator_of_pinned; }

void record_on_stream(const c10::DataPtr& memory, const c10::Stream& used_on) {
  if (Block* const block = static_cast<Block*>(memory.get_context())) block->used_on.insert(used_on);
}

bool is_pinned(const void* address) {
  const std::lock_guard lock(pinned().mutex);
  auto next = pinned().blocks.upper_bound(address);
  if (next == pinned().blocks.begin()) return false;
  --next;
  return static_cast<const char*>(address) < static_cast<const char*>(next->first) + next->second;
}

}  // namespace muster::device_double

/// As CUDA's function, which has "cuda" in the place of the device's name.
extern "C" int simulatedThreadExchangeStreamCaptureMode(int* mode) {
  using muster::device_double::CaptureMode;
  *mode = static_cast<int>(muster::device_double::exchange_capture_mode(static_cast<CaptureMode>(*mode)));
  return 0;
}
