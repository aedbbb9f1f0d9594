#include "muster/mpi/device.h"

#include <atomic>
#include <mutex>
#include <optional>
#include <string>

namespace muster::mpi {

struct Device {
  std::string type;
  int index;
  ExchangeDevice exchange;
};

namespace {

std::mutex choosing;
std::optional<Device> chosen;                  ///< guarded by choosing, and constant once it is set
std::atomic<const Device*> current = nullptr;  ///< chosen, once it is set

}  // namespace

bool use_device(std::string_view type, int index, const ExchangeDevice& exchange) {
  const std::lock_guard lock(choosing);
  if (!chosen) current = &chosen.emplace(Device{std::string(type), index, exchange});
  return chosen->type == type && chosen->index == index;
}

CurrentDevice::CurrentDevice() : device_(current) {
  if (device_ != nullptr) previous_ = device_->exchange(device_->index);
}
CurrentDevice::~CurrentDevice() {
  if (device_ != nullptr) device_->exchange(previous_);
}

}  // namespace muster::mpi
