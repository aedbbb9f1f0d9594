// The native parts of muster.optim. The inner optimizer stays in Python, which steps it before it calls C++. Outer
// optimizers are Python objects, too: C++ calls their step().
#include <pybind11/functional.h>
#include <torch/optim/sgd.h>

#include "bindings.h"
#include "hooks.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/optim/diloco.h"
#include "muster/torch/optim/local_sgd.h"

namespace muster::python {
namespace {

using Backend = c10::intrusive_ptr<c10d::Backend>;
using NoGil = py::call_guard<py::gil_scoped_release>;
using Parameters = std::vector<at::Tensor>;
/// A function in Python. May be called, copied and destroyed without the GIL: pybind11 takes it.
using PythonStep = std::function<void()>;

/// The parameters of a Python optimizer. Python saves the optimizer's state.
class PythonOptimizer : public torch::optim::Optimizer {
 public:
  explicit PythonOptimizer(Parameters parameters, PythonStep step = nullptr)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<torch::optim::SGDOptions>(0.0)),
        step_(std::move(step)) {}
  at::Tensor step(LossClosure) override {
    if (step_) step_();
    return {};
  }

 private:
  PythonStep step_;  ///< null if Python calls it
};

optim::MakeOuter call_python(std::function<PythonStep(Parameters)> make) {
  return [make = std::move(make)](Parameters parameters) {
    PythonStep step = make(parameters);
    return std::make_unique<PythonOptimizer>(std::move(parameters), std::move(step));
  };
}

/// A collective call. Must be called without the GIL.
template <class Native, class... Arguments>
std::shared_ptr<Native> make(const Backend& backend, Parameters parameters, Arguments&&... arguments) {
  const auto inner = std::make_shared<PythonOptimizer>(std::move(parameters));  // the native optimizer refers to it
  return {new Native(group_of(muster_backend(backend)), *inner, std::forward<Arguments>(arguments)...),
          [inner](Native* native) { delete native; }};
}

uint64_t count(const char* name, int64_t value) {
  check_argument(value >= 0, "muster.optim", name, " must not be negative, got ", value);
  return static_cast<uint64_t>(value);
}

template <class Native>
auto bind_optimizer(py::module_& module, const char* name) {
  return py::class_<Native, std::shared_ptr<Native>>(module, name)
      .def(
          "step", [](Native& self) { self.step(); }, NoGil())
      .def("synchronize", &Native::synchronize, NoGil())
      .def_property("steps", &Native::steps, &Native::set_steps);
}

}  // namespace

// The constructors have no call_guard: pybind11 would register the new object within it, but needs the GIL for that.
void bind_optim(py::module_& module) {
  bind_optimizer<optim::LocalSGD>(module, "LocalSGD")
      .def(py::init([](const Backend& backend, Parameters parameters, int64_t sync_every, int64_t warmup, bool init) {
             const optim::LocalSGDOptions options{count("sync_every", sync_every), count("warmup", warmup), init};
             const py::gil_scoped_release without_gil;
             return make<optim::LocalSGD>(backend, std::move(parameters), options);
           }),
           py::arg("backend"), py::arg("parameters"), py::arg("sync_every"), py::arg("warmup"), py::arg("init_sync"));
  bind_optimizer<optim::DiLoCo>(module, "DiLoCo")
      .def(py::init([](const Backend& backend, Parameters parameters, std::function<PythonStep(Parameters)> make_outer,
                       const NativeHook& hook, int64_t sync_every, int64_t fragments, int64_t delay,
                       std::optional<double> merge_alpha, bool init_sync) {
             const optim::DiLoCoOptions options{count("sync_every", sync_every),
                                                call_python(std::move(make_outer)),
                                                count("fragments", fragments),
                                                count("delay", delay),
                                                merge_alpha,
                                                init_sync};
             const py::gil_scoped_release without_gil;
             return make<optim::DiLoCo>(backend, std::move(parameters), options, hook.create(muster_backend(backend)));
           }),
           py::arg("backend"), py::arg("parameters"), py::arg("make_outer"), py::arg("hook"), py::arg("sync_every"),
           py::arg("fragments"), py::arg("delay"), py::arg("merge_alpha"), py::arg("init_sync"))
      .def("finish", &optim::DiLoCo::finish, NoGil());
}

}  // namespace muster::python
