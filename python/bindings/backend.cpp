#include "muster/torch/backend.h"

#include <pybind11/chrono.h>

#include <mutex>
#include <vector>

#include "bindings.h"
#include "hooks.h"
#include "muster/shm/arena.h"

namespace muster::python {
namespace {

using std::chrono::milliseconds;

/// The live backends of this process. They are shut down when the process exits.
class Backends {
 public:
  void add(const c10::intrusive_ptr<ProcessGroupMuster>& backend) {
    const std::lock_guard lock(mutex_);
    std::erase_if(all_, [](const auto& each) { return each.expired(); });
    all_.emplace_back(backend);
  }
  void shut_down() {
    std::vector<c10::weak_intrusive_ptr<ProcessGroupMuster>> all;
    {
      const std::lock_guard lock(mutex_);
      all.swap(all_);
    }
    for (const auto& each : all) {
      if (const auto backend = each.lock()) backend->shutdown();
    }
  }

 private:
  std::mutex mutex_;  // guards all_
  std::vector<c10::weak_intrusive_ptr<ProcessGroupMuster>> all_;
};

}  // namespace

void bind_backend(py::module_& module) {
  const auto backends = std::make_shared<Backends>();  // the functions below share it
  const auto arena = Arena::create();                  // allocates no memory before the first tensor
  module.def(
      "create_backend",
      [backends, arena](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, milliseconds timeout,
                        const std::string& name) -> c10::intrusive_ptr<c10d::Backend> {
        return ProcessGroupMuster::create(store, {rank, size, name, 0}, timeout, arena,
                                          [backends](const auto& backend) { backends->add(backend); });
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("name"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "duplicate_backend",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) -> c10::intrusive_ptr<c10d::Backend> {
        return muster_backend(backend)->duplicate();
      },
      py::arg("backend"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "cancel_coalescing",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) { muster_backend(backend)->cancelCoalescing(); },
      py::arg("backend"));
  // A program may end without destroying its groups. A group's thread needs the GIL to release a tensor, and an
  // interpreter that shuts down kills threads that ask for the GIL.
  py::module_::import("atexit").attr("register")(
      py::cpp_function([backends] { backends->shut_down(); }, py::call_guard<py::gil_scoped_release>()));
}

}  // namespace muster::python
