#include "muster/mpi/device.h"

#include <fmt/format.h>

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

#include "muster/base/log.h"

namespace muster::mpi {

struct Device {
  std::string type;
  int index;
  ExchangeDevice exchange;
};

namespace {

std::mutex choosing;
bool warned = false;  ///< guarded by choosing
/// Never deleted: muster calls MPI also after the destructors of static objects.
std::atomic<const Device*> chosen = nullptr;

}  // namespace

bool use_device(std::string_view type, int index, const ExchangeDevice& exchange) {
  const std::lock_guard lock(choosing);
  if (chosen == nullptr) chosen = new Device{std::string(type), index, exchange};
  const Device& device = *chosen;
  const bool same = device.type == type && device.index == index;
  if (!same && !std::exchange(warned, true)) {
    log(LogLevel::kWarning,
        fmt::format("tensors on {}:{} go through the host: this process gives MPI the memory of {}:{}", type, index,
                    device.type, device.index));
  }
  return same;
}

CurrentDevice::CurrentDevice() : device_(chosen) {
  if (device_ != nullptr) previous_ = device_->exchange(device_->index);
}
CurrentDevice::~CurrentDevice() {
  if (device_ != nullptr) device_->exchange(previous_);
}

}  // namespace muster::mpi
