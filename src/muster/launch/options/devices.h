#pragma once

#include <filesystem>
#include <vector>

#include "muster/launch/options/options.h"

namespace muster {

/// The GPUs of NVIDIA or AMD that this machine, or this container, has files for. `root`: of its file system.
int count_gpus(const std::filesystem::path& root = "/");

/// Those of `devices`, which are given in the machine's order, that programs see with this environment's
/// CUDA_VISIBLE_DEVICES (AMD's too), in the order in which they count them. As for CUDA, the first word that names no
/// device ends the list. -1 stands for one that is named otherwise than by its number (GPU-..., MIG-...).
std::vector<int> visible_devices(std::vector<int> devices, const Environment& environment);

}  // namespace muster
