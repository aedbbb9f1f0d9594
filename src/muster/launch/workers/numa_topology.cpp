#include "muster/launch/workers/numa.h"

#ifdef MUSTER_WITH_HWLOC
#include <dlfcn.h>
#include <hwloc.h>

#include <algorithm>
#endif

namespace muster {

#ifdef MUSTER_WITH_HWLOC
namespace {

// The library is loaded when it is needed: `muster` starts without it, and runs where it is not installed.
class Hwloc {
 public:
  Hwloc() : library_(::dlopen("libhwloc.so.15", RTLD_NOW | RTLD_LOCAL)) {
    complete_ = library_ != nullptr && find(init, "hwloc_topology_init") && find(load, "hwloc_topology_load") &&
                find(destroy, "hwloc_topology_destroy") && find(set_io_types, "hwloc_topology_set_io_types_filter") &&
                find(depth, "hwloc_get_type_depth") && find(count, "hwloc_get_nbobjs_by_depth") &&
                find(object, "hwloc_get_obj_by_depth") && find(next, "hwloc_bitmap_next");
  }
  ~Hwloc() {
    if (library_ != nullptr) ::dlclose(library_);
  }
  Hwloc(const Hwloc&) = delete;
  Hwloc& operator=(const Hwloc&) = delete;
  bool complete() const { return complete_; }

  decltype(&hwloc_topology_init) init = nullptr;
  decltype(&hwloc_topology_load) load = nullptr;
  decltype(&hwloc_topology_destroy) destroy = nullptr;
  decltype(&hwloc_topology_set_io_types_filter) set_io_types = nullptr;
  decltype(&hwloc_get_type_depth) depth = nullptr;
  decltype(&hwloc_get_nbobjs_by_depth) count = nullptr;
  decltype(&hwloc_get_obj_by_depth) object = nullptr;
  decltype(&hwloc_bitmap_next) next = nullptr;

 private:
  template <class Function>
  bool find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(library_, name));
    return function != nullptr;
  }

  void* library_;
  bool complete_ = false;
};

class TopologyReader {
 public:
  TopologyReader(const Hwloc& hwloc, hwloc_topology_t topology) : hwloc_(hwloc), topology_(topology) {}

  NumaTopology read() const {
    NumaTopology found;
    std::vector<Cpus> node_cpus;
    const auto packages = sets(HWLOC_OBJ_PACKAGE), cores = sets(HWLOC_OBJ_CORE), caches = sets(HWLOC_OBJ_L3CACHE);
    const auto numa_nodes = sets(HWLOC_OBJ_NUMANODE);
    for (const Cpus& cpus : numa_nodes) {
      if (is_only_memory(cpus, numa_nodes)) continue;
      NumaTopology::Node node{0, within(cores, cpus), within(caches, cpus)};
      for (size_t i = 0; i < packages.size(); ++i)
        if (overlap(packages[i], cpus)) node.package = static_cast<int>(i);
      found.nodes.push_back(std::move(node));
      node_cpus.push_back(cpus);
    }
    for (const Cpus& near : gpu_surroundings()) {
      const auto node = std::find_if(node_cpus.begin(), node_cpus.end(), [&](auto& c) { return overlap(c, near); });
      found.devices.push_back(node == node_cpus.end() ? -1 : static_cast<int>(node - node_cpus.begin()));
    }
    return found;
  }

 private:
  Cpus cpus(hwloc_const_cpuset_t set) const {
    Cpus list;
    for (int cpu = -1; set != nullptr && (cpu = hwloc_.next(set, cpu)) >= 0;)
      if (std::binary_search(allowed_.begin(), allowed_.end(), cpu)) list.push_back(cpu);
    return list;
  }

  template <class Visit>
  void each(hwloc_obj_type_t type, Visit visit) const {
    const int depth = hwloc_.depth(topology_, type);
    const unsigned count = hwloc_.count(topology_, depth);
    for (unsigned i = 0; i < count; ++i) visit(*hwloc_.object(topology_, depth, i));
  }

  // The CPUs of every object of a type; those without any are left out.
  std::vector<Cpus> sets(hwloc_obj_type_t type) const {
    std::vector<Cpus> found;
    each(type, [&](const hwloc_obj& object) {
      if (Cpus set = cpus(object.cpuset); !set.empty()) found.push_back(std::move(set));
    });
    return found;
  }

  std::vector<Cpus> gpu_surroundings() const {
    constexpr unsigned kNvidia = 0x10de, kAmd = 0x1002;
    const auto found = gpus_of(kNvidia);
    return found.empty() ? gpus_of(kAmd) : found;  // beside NVIDIA's an AMD processor's own GPU counts for nothing
  }

  std::vector<Cpus> gpus_of(unsigned vendor) const {
    constexpr unsigned kDisplay = 0x03;
    std::vector<Cpus> found;
    each(HWLOC_OBJ_PCI_DEVICE, [&](const hwloc_obj& device) {
      const auto& pci = device.attr->pcidev;
      if (pci.class_id >> 8 != kDisplay || pci.vendor_id != vendor) return;
      const hwloc_obj* above = &device;
      while (above != nullptr && above->cpuset == nullptr) above = above->parent;
      if (above != nullptr) found.push_back(cpus(above->cpuset));
    });
    return found;
  }

  // A node without CPUs of its own (a GPU's, or fast memory) has those of the nodes around it.
  static bool is_only_memory(const Cpus& cpus, const std::vector<Cpus>& nodes) {
    return std::any_of(nodes.begin(), nodes.end(), [&](const Cpus& other) {
      return &other != &cpus && overlap(other, cpus) &&
             (other.size() < cpus.size() || (other.size() == cpus.size() && &other < &cpus));
    });
  }

  static bool overlap(const Cpus& a, const Cpus& b) {
    return std::any_of(a.begin(), a.end(), [&](int cpu) { return std::binary_search(b.begin(), b.end(), cpu); });
  }
  static std::vector<Cpus> within(const std::vector<Cpus>& groups, const Cpus& cpus) {
    std::vector<Cpus> inside;
    std::copy_if(groups.begin(), groups.end(), std::back_inserter(inside), [&](auto& g) { return overlap(g, cpus); });
    return inside;
  }

  const Hwloc& hwloc_;
  hwloc_topology_t topology_;
  const Cpus allowed_ = allowed_cpus();
};

}  // namespace

Result<NumaTopology> read_numa_topology() {
  const Hwloc hwloc;
  if (!hwloc.complete())
    return fail(ErrorCode::kUnsupported,
                "--numa-binding needs hwloc, and there is no libhwloc.so.15 here: install it "
                "(Debian and Ubuntu: libhwloc15)");
  hwloc_topology_t topology = nullptr;
  if (hwloc.init(&topology) != 0) return fail(ErrorCode::kResourceExhausted, "--numa-binding: hwloc cannot start");
  Result<NumaTopology> found = fail(ErrorCode::kUnavailable, "--numa-binding: hwloc cannot read this machine");
  hwloc.set_io_types(topology, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  if (hwloc.load(topology) == 0) found = TopologyReader(hwloc, topology).read();
  hwloc.destroy(topology);
  return found;
}

#else

Result<NumaTopology> read_numa_topology() {
  return fail(ErrorCode::kUnsupported,
              "--numa-binding needs hwloc, and this muster was built without it (libhwloc-dev)");
}

#endif

}  // namespace muster
