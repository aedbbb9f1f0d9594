// muster::Reducer, with the names of torch's Reducer.
#include "muster/torch/reducer/reducer.h"

#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "bindings.h"
#include "hooks.h"
#include "muster/torch/exception.h"

namespace muster::python {
namespace {

using c10d::PythonCommHook;
using torch::jit::PythonFutureWrapper;
/// For functions that take the reducer's mutex: a backward pass may hold this mutex while it waits for the GIL.
using WithoutLock = py::call_guard<py::gil_scoped_release>;

std::shared_ptr<Group> checked_group_of(const c10::intrusive_ptr<c10d::Backend>& backend) {
  return group_of(muster_backend(backend, "muster.nn.DistributedDataParallel"));
}

/// Raises the failure as a Python exception, because torch's engine passes on only C++ exceptions that torch knows.
void throw_in_python(const ErrorException& failure) {
  const py::gil_scoped_acquire locked;
  raise(failure.error());
  python_error error;
  error.persist();
  throw error;
}

std::shared_ptr<Reducer> make_reducer(const c10::intrusive_ptr<c10d::Backend>& backend,
                                      std::vector<at::Tensor> parameters, ReducerOptions options) {
  auto group = checked_group_of(backend);
  options.device_group = &muster_backend(backend)->device_group();
  options.on_failure = &throw_in_python;
  const py::gil_scoped_release unlocked;
  const auto destroy = [](Reducer* reducer) {
    const py::gil_scoped_release unlocked;  // the last reduction may release a tensor that Python owns
    delete reducer;
  };
  return {new Reducer(std::move(group), std::move(parameters), std::move(options)), destroy};
}

void wait_at_end(Reducer& reducer, const std::vector<std::shared_ptr<PythonFutureWrapper>>& futures) {
  for (const auto& future : futures) reducer.wait_at_end(future->fut);
}

py::dict times_of(const Reducer& reducer) {
  const BackwardTimes& times = reducer.times();
  py::list buckets;
  for (const BucketTimes& each : times.buckets) {
    buckets.append(py::dict(py::arg("first_ready") = each.first_ready.ns, py::arg("ready") = each.ready.ns,
                            py::arg("begun") = each.begun.ns, py::arg("ended") = each.ended.ns,
                            py::arg("last_parameter") = each.last_parameter));
  }
  py::dict dict(py::arg("iteration") = times.iteration, py::arg("forward") = times.forward.ns,
                py::arg("backward") = times.backward.ns, py::arg("last_gradient") = times.last_gradient.ns,
                py::arg("ended") = times.ended.ns, py::arg("buckets") = buckets);
  return dict;
}

void bind_options(py::module_& module) {
  py::class_<ReducerOptions>(module, "ReducerOptions")
      .def(py::init<>())
      .def_readwrite("names", &ReducerOptions::names)
      .def_readwrite("bucket_bytes", &ReducerOptions::bucket_bytes)
      .def_readwrite("first_bucket_bytes", &ReducerOptions::first_bucket_bytes)
      .def_readwrite("bucket_bytes_list", &ReducerOptions::bucket_bytes_list)
      .def_readwrite("gradient_as_bucket_view", &ReducerOptions::gradient_as_bucket_view)
      .def_readwrite("find_unused_parameters", &ReducerOptions::find_unused_parameters)
      .def_readwrite("static_graph", &ReducerOptions::static_graph)
      .def_readwrite("skip_all_reduce_unused_parameters", &ReducerOptions::skip_all_reduce_unused_parameters)
      .def_readwrite("verify", &ReducerOptions::verify)
      .def_readwrite("model_parameters", &ReducerOptions::model_parameters)
      .def_readwrite("model_buffers", &ReducerOptions::model_buffers)
      .def_readwrite("sparse", &ReducerOptions::sparse);
}

}  // namespace

void bind_reducer(py::module_& module) {
  bind_options(module);
  const auto set_hook = [](Reducer& self, py::object state, py::object hook,
                           const std::vector<c10::intrusive_ptr<c10d::Backend>>& backends) {
    std::vector<std::shared_ptr<Group>> groups;
    for (const auto& backend : backends) groups.push_back(checked_group_of(backend));
    auto made = std::make_unique<PythonCommHook>(std::move(state), std::move(hook));
    const py::gil_scoped_release unlocked;
    self.set_hook(std::move(made), std::move(groups));
  };
  const auto set_native_hook = [](Reducer& self, const c10::intrusive_ptr<c10d::Backend>& backend,
                                  const NativeHook& hook) { self.set_hook(hook.create(muster_backend(backend))); };
  py::class_<Reducer, std::shared_ptr<Reducer>>(module, "Reducer")
      .def(py::init(&make_reducer), py::arg("backend"), py::arg("parameters"), py::arg("options"))
      .def("prepare_for_forward", &Reducer::prepare_for_forward, WithoutLock())
      .def("prepare_for_backward", &Reducer::prepare_for_backward, py::arg("outputs"), WithoutLock())
      .def("_rebuild_buckets", &Reducer::rebuild_buckets, WithoutLock())
      .def("_register_comm_hook", set_hook, py::arg("state"), py::arg("hook"), py::arg("backends"))
      .def("_register_native_hook", set_native_hook, py::arg("backend"), py::arg("hook"), WithoutLock())
      .def("_install_post_backward_futures", &wait_at_end, py::arg("futures"))
      .def("_shadow_backward", &Reducer::shadow_backward, WithoutLock())
      .def("_set_forward_pass_work_handle", &Reducer::set_forward_work, py::arg("work"),
           py::arg("use_static_world_size"), WithoutLock())
      .def("_get_local_used_map", &Reducer::used_map, WithoutLock())
      .def("_set_static_graph", &Reducer::set_static_graph, WithoutLock())
      .def("_ddp_graph_static", &Reducer::graph_is_static)
      .def("_in_first_static_iteration", &Reducer::in_first_static_iteration)
      .def("_delay_all_reduce", &Reducer::delay_all_reduce, WithoutLock())
      .def("_set_optimizer_in_backward", &Reducer::set_optimizer_in_backward)
      .def("_set_reduction_dtype", &Reducer::set_reduction_dtype, py::arg("dtype"), WithoutLock())
      .def("_remove_autograd_hooks", &Reducer::remove_hooks, WithoutLock())
      .def("_check_reducer_finalized", &Reducer::check_finished, WithoutLock())
      .def("_last_error", &Reducer::last_error, WithoutLock())
      .def("_note_error", &Reducer::note_error, py::arg("text"), WithoutLock())
      .def("_reset_state", &Reducer::reset, WithoutLock())
      .def(
          "_set_backend",
          [](Reducer& self, const c10::intrusive_ptr<c10d::Backend>& backend) {
            self.set_group(checked_group_of(backend), &muster_backend(backend)->device_group());
          },
          py::arg("backend"), WithoutLock())
      .def("bucket_parameters", &Reducer::bucket_parameters)
      .def("bucket_bytes", &Reducer::bucket_bytes)
      .def("times", &times_of)
      .def_property_readonly("names", &Reducer::names);
}

}  // namespace muster::python
