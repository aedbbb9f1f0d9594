#include "hooks.h"

#include "bindings.h"
#include "muster/torch/c10d/arguments.h"

namespace muster::python {
namespace {

NativeHook half(const char* name, at::ScalarType wire) {
  return {name, false, [wire](HookGroups groups) { return half_compress_hook(std::move(groups), wire); }};
}

template <class Options>
NativeHook hook_with_options(std::string name, bool two_phases, const Options& options,
                             Hook (*make)(HookGroups, const Options&)) {
  options.check();
  return {std::move(name), two_phases, [make, options](HookGroups groups) { return make(std::move(groups), options); }};
}

}  // namespace

c10::intrusive_ptr<ProcessGroupMuster> muster_backend(const c10::intrusive_ptr<c10d::Backend>& backend) {
  const auto found = c10::dynamic_intrusive_pointer_cast<ProcessGroupMuster>(backend);
  check_argument(found != nullptr, "native hook", "the process group's backend is \"", backend->getBackendName(),
                 "\"; muster's hooks need a group that init_process_group(\"muster\") or new_group() made");
  return found;
}

c10::intrusive_ptr<ProcessGroupMuster> muster_backend(const c10::intrusive_ptr<c10d::Backend>& backend,
                                                      const char* user) {
  auto found = c10::dynamic_intrusive_pointer_cast<ProcessGroupMuster>(backend);
  if (!found) {
    throw py::type_error(c10::str(user, " needs a process group whose CPU backend is \"muster\", not \"",
                                  backend->getBackendName(), "\": make it with init_process_group(\"muster\")"));
  }
  return found;
}

void bind_hooks(py::module_& module) {
  py::class_<NativeHook>(module, "NativeHook")
      .def_readonly("name", &NativeHook::name)
      .def("__repr__", [](const NativeHook& hook) { return "muster.hooks." + hook.name; })
      .def_static("all_reduce",
                  []() -> NativeHook {
                    return {"all_reduce()", false, all_reduce_hook};
                  })
      .def_static("fp16", [] { return half("fp16()", at::kHalf); })
      .def_static("bf16", [] { return half("bf16()", at::kBFloat16); })
      .def_static(
          "int8",
          [](size_t block) {
            return hook_with_options(c10::str("int8(block=", block, ")"), true, Int8Options{block}, &int8_hook);
          },
          py::arg("block"))
      .def_static(
          "top_k",
          [](double ratio) {
            return hook_with_options(c10::str("top_k(ratio=", ratio, ")"), false, TopKOptions{ratio}, &top_k_hook);
          },
          py::arg("ratio"))
      .def_static(
          "power_sgd",
          [](size_t rank, uint64_t start, double min_compression_rate, uint64_t seed) {
            const PowerSgdOptions options{rank, start, min_compression_rate, seed};
            return hook_with_options(c10::str("power_sgd(rank=", rank, ", start_powerSGD_iter=", start, ")"), true,
                                     options, &power_sgd_hook);
          },
          py::arg("rank"), py::arg("start_powerSGD_iter"), py::arg("min_compression_rate"), py::arg("seed"));
}

}  // namespace muster::python
