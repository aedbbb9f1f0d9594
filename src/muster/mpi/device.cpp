#include "muster/mpi/device.h"

#include <fmt/format.h>

#include <atomic>
#include <mutex>
#include <optional>
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
std::optional<Device> chosen;                  ///< guarded by choosing, and constant once it is set
bool warned = false;                           ///< guarded by choosing
std::atomic<const Device*> current = nullptr;  ///< chosen, once it is set

}  // namespace

bool use_device(std::string_view type, int index, const ExchangeDevice& exchange) {
  const std::lock_guard lock(choosing);
  if (!chosen) current = &chosen.emplace(Device{std::string(type), index, exchange});
  const bool same = chosen->type == type && chosen->index == index;
  if (!same && !std::exchange(warned, true)) {
    log(LogLevel::kWarning,
        fmt::format("tensors on {}:{} go through the host: this process gives MPI the memory of {}:{}", type, index,
                    chosen->type, chosen->index));
  }
  return same;
}

CurrentDevice::CurrentDevice() : device_(current) {
  if (device_ != nullptr) previous_ = device_->exchange(device_->index);
}
CurrentDevice::~CurrentDevice() {
  if (device_ != nullptr) device_->exchange(previous_);
}

}  // namespace muster::mpi
