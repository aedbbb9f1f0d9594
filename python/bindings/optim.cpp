// The native halves of muster.optim. The inner optimizer stays in Python, which steps it before it calls here. Outer
// optimizers are Python's, too: C++ calls their step().
#include <torch/optim/sgd.h>

#include "bindings.h"
#include "hooks.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/optim/diloco.h"
#include "muster/torch/optim/local_sgd.h"

namespace muster::python {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
/// May be copied and destroyed without the GIL.
using SharedFunction = std::shared_ptr<const py::function>;

SharedFunction share(py::function function) {
  return {new py::function(std::move(function)), [](const py::function* held) {
            const py::gil_scoped_acquire locked;
            delete held;
          }};
}

/// Parameters of a Python optimizer, whose state Python saves.
class PythonOptimizer : public torch::optim::Optimizer {
 public:
  PythonOptimizer(std::vector<at::Tensor> parameters, SharedFunction step)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<torch::optim::SGDOptions>(0.0)),
        step_(std::move(step)) {}
  at::Tensor step(LossClosure) override {
    if (step_ != nullptr) {
      const py::gil_scoped_acquire locked;
      (*step_)();
    }
    return {};
  }

 private:
  SharedFunction step_;  ///< null if Python calls it
};

/// A native optimizer, and the inner one that it refers to.
template <class Native>
struct Wrapped {
  template <class... Arguments>
  Wrapped(const c10::intrusive_ptr<c10d::Backend>& backend, std::vector<at::Tensor> parameters,
          Arguments&&... arguments)
      : inner(std::move(parameters), nullptr),
        native(group_of(muster_backend(backend)), inner, std::forward<Arguments>(arguments)...) {}
  PythonOptimizer inner;
  Native native;
};

uint64_t count(const char* name, int64_t value) {
  check_argument(value >= 0, "muster.optim", name, " must not be negative, got ", value);
  return static_cast<uint64_t>(value);
}

optim::MakeOuter call_python(SharedFunction make) {
  return [make = std::move(make)](std::vector<at::Tensor> parameters) {
    const py::gil_scoped_acquire locked;
    SharedFunction step = share((*make)(parameters));
    return std::make_unique<PythonOptimizer>(std::move(parameters), std::move(step));
  };
}

template <class Native>
auto bind_optimizer(py::module_& module, const char* name) {
  using Self = Wrapped<Native>;
  return py::class_<Self, std::shared_ptr<Self>>(module, name)
      .def(
          "step", [](Self& self) { self.native.step(); }, NoGil())
      .def(
          "synchronize", [](Self& self) { self.native.synchronize(); }, NoGil())
      .def_property(
          "steps", [](const Self& self) { return self.native.steps(); },
          [](Self& self, uint64_t steps) { self.native.set_steps(steps); });
}

}  // namespace

void bind_optim(py::module_& module) {
  using Backend = c10::intrusive_ptr<c10d::Backend>;
  using Parameters = std::vector<at::Tensor>;
  using LocalSGD = Wrapped<optim::LocalSGD>;
  bind_optimizer<optim::LocalSGD>(module, "LocalSGD")
      .def(py::init([](const Backend& backend, Parameters parameters, int64_t sync_every, int64_t warmup,
                       bool init_sync) {
             const optim::LocalSGDOptions options{count("sync_every", sync_every), count("warmup", warmup), init_sync};
             return std::make_shared<LocalSGD>(backend, std::move(parameters), options);
           }),
           py::arg("backend"), py::arg("parameters"), py::arg("sync_every"), py::arg("warmup"), py::arg("init_sync"),
           NoGil());
  using DiLoCo = Wrapped<optim::DiLoCo>;
  bind_optimizer<optim::DiLoCo>(module, "DiLoCo")
      .def(py::init([](const Backend& backend, Parameters parameters, py::function make_outer, const NativeHook& hook,
                       int64_t sync_every, int64_t fragments, int64_t delay, std::optional<double> merge_alpha,
                       bool init_sync) {
             optim::DiLoCoOptions options;
             options.sync_every = count("sync_every", sync_every);
             options.outer = call_python(share(std::move(make_outer)));
             options.fragments = count("fragments", fragments);
             options.delay = count("delay", delay);
             options.mixing = merge_alpha;
             options.init_sync = init_sync;
             const py::gil_scoped_release unlocked;
             return std::make_shared<DiLoCo>(backend, std::move(parameters), options,
                                             hook.make(muster_backend(backend)));
           }),
           py::arg("backend"), py::arg("parameters"), py::arg("make_outer"), py::arg("hook"), py::arg("sync_every"),
           py::arg("fragments"), py::arg("delay"), py::arg("merge_alpha"), py::arg("init_sync"))
      .def(
          "finish", [](DiLoCo& self) { self.native.finish(); }, NoGil());
}

}  // namespace muster::python
