#include "muster/torch/backend.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "hooks.h"
#include "muster/mpi/group.h"
#include "muster/mpi/job.h"
#include "muster/shm/arena.h"
#include "muster/torch/exception.h"
#include "muster/torch/store.h"

namespace muster::python {
namespace {

using std::chrono::milliseconds;

/// The live backends of this process. They are shut down when the process exits.
class Backends {
 public:
  void add(const c10::intrusive_ptr<ProcessGroupMuster>& backend) {
    join_all();
    const std::lock_guard lock(mutex_);
    std::erase_if(all_, [](const auto& each) { return each.expired(); });
    all_.emplace_back(backend);
  }
  /// In a thread of its own, because a group waits for its threads. The caller may hold the GIL, which they need to
  /// release tensors, or be one of them: a Work's callback may be the last owner of the backend.
  void destroy(std::unique_ptr<Store> store, std::unique_ptr<Group> group) {
    const std::lock_guard lock(mutex_);
    if (shut_down_) return;  // the group has left, and its threads hold no tensors
    threads_.emplace_back([store = std::move(store), group = std::move(group)]() mutable {
      group.reset();
      store.reset();
    });
  }
  void shut_down() {
    std::vector<c10::weak_intrusive_ptr<ProcessGroupMuster>> all;
    {
      const std::lock_guard lock(mutex_);
      shut_down_ = true;
      all.swap(all_);
    }
    for (const auto& each : all) {
      if (const auto backend = each.lock()) backend->shutdown();
    }
    join_all();
  }

 private:
  void join_all() {
    std::vector<std::thread> threads;
    {
      const std::lock_guard lock(mutex_);
      // A forked child has the objects of its parent's threads, and must neither join nor destroy them.
      if (process_ != getpid()) static_cast<void>(new auto(std::exchange(threads_, {})));
      process_ = getpid();
      threads.swap(threads_);
    }
    for (std::thread& thread : threads) thread.join();
  }

  std::mutex mutex_;  // guards the fields below
  std::vector<c10::weak_intrusive_ptr<ProcessGroupMuster>> all_;
  std::vector<std::thread> threads_;  // of destroy()
  pid_t process_ = getpid();          // that started them
  bool shut_down_ = false;
};

ProcessGroupMuster::Callbacks callbacks_of(const std::shared_ptr<Backends>& backends) {
  return {[backends](const auto& backend) { backends->add(backend); },
          [backends](auto store, auto group) { backends->destroy(std::move(store), std::move(group)); }};
}

void bind_mpi(py::module_& module, const std::shared_ptr<Backends>& backends) {
  module.def(
      "create_mpi_backend",
      [backends](const c10::intrusive_ptr<c10d::Store>& store, const std::vector<Rank>& ranks, milliseconds timeout,
                 const std::string& name) -> c10::intrusive_ptr<c10d::Backend> {
        GroupOptions options;
        options.timeout = timeout;
        auto backend = c10::make_intrusive<ProcessGroupMuster>(store_over_c10d(store),
                                                               value_or_throw(mpi::form_group(ranks, name, options)),
                                                               timeout, callbacks_of(backends));
        backends->add(backend);
        return backend;
      },
      py::arg("store"), py::arg("ranks"), py::arg("timeout"), py::arg("name"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "mpi_position",
      [] {
        const mpi::Position position = value_or_throw(mpi::position());
        return std::tuple(position.rank, position.size, position.library);
      },
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "mpi_job_environment",
      [](milliseconds timeout) { return value_or_throw(mpi::job_environment(Deadline::after(timeout))); },
      py::arg("timeout"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "mpi_abort_job", [](const std::string& why) { mpi::abort_job(why); }, py::arg("why"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_backend(py::module_& module) {
  const auto backends = std::make_shared<Backends>();  // the functions below share it
  bind_mpi(module, backends);
  const auto arena = Arena::create();  // allocates no memory before the first tensor
  module.def(
      "create_backend",
      [backends, arena](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, milliseconds timeout,
                        const std::string& name, const std::optional<std::string>& transport,
                        const std::optional<std::string>& interface, std::optional<int> streams,
                        const std::optional<std::string>& label, bool unformed) -> c10::intrusive_ptr<c10d::Backend> {
        GroupOptions options = value_or_throw(group_options_from_environment());
        options.timeout = timeout;
        options.arena = arena;
        if (transport) options.transports = *transport;
        if (interface) options.interface = *interface;
        if (streams) options.tcp_streams = *streams;
        if (label) options.host_label = *label;
        const GroupSpec membership{rank, size, name, 0};
#if MUSTER_TORCH_HAS_RECONFIGURE
        if (unformed) return ProcessGroupMuster::create_unformed(store, membership, options, callbacks_of(backends));
#else
        (void)unformed;  // only torch with reconfigure() asks for it
#endif
        return ProcessGroupMuster::create(store, membership, options, callbacks_of(backends));
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("name"), py::arg("transport"),
      py::arg("interface"), py::arg("streams"), py::arg("label"), py::arg("unformed"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "backend_id",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) { return muster_backend(backend)->group().id(); },
      py::arg("backend"));
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
  module.def(
      "shut_down_backends", [backends] { backends->shut_down(); }, py::call_guard<py::gil_scoped_release>());
}

}  // namespace muster::python
