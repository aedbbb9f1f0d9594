#pragma once

#include <functional>
#include <string_view>

namespace muster::mpi {

// The device whose memory this process gives to MPI. MPI looks for memory on the current device of the thread that
// calls it, so there is one device in a process: the first that it is asked for. Thread-safe.

/// Makes a device of this type current in the calling thread, by its index, and returns the index of the previous one.
using ExchangeDevice = std::function<int(int index)>;

/// False if this process gives MPI the memory of another device.
bool use_device(std::string_view type, int index, const ExchangeDevice& exchange);

struct Device;

/// Makes that device the current one of this thread while the object lives, if there is such a device.
class CurrentDevice {
 public:
  CurrentDevice();
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  const Device* device_;
  int previous_ = 0;
};

}  // namespace muster::mpi
