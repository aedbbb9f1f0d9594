#pragma once

#include <filesystem>
#include <vector>

#include "muster/launch/options/options.h"

namespace muster {

/// The number of NVIDIA or AMD GPUs with device files in this machine or container. `root`: the root directory.
int count_gpus(const std::filesystem::path& root = "/");

/// The devices that programs see with CUDA_VISIBLE_DEVICES (and AMD's variables) of this environment, in the order in
/// which the programs number them. `devices` is in the machine's order. As in CUDA, the first invalid entry ends the
/// list. -1 stands for a device that is not named by its number (GPU-..., MIG-...).
std::vector<int> visible_devices(std::vector<int> devices, const Environment& environment);

}  // namespace muster
