// Errors of wrong use. Each begins as that of torch's reducer: programs and tests search for these words.
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "muster/torch/reducer/reducer_impl.h"

namespace muster {

std::string ReducerContext::name_of(size_t index) const {
  const bool named = index < options.names.size() && !options.names[index].empty();
  return named ? c10::str(index, " (", options.names[index], ")") : std::to_string(index);
}

void Reducer::Impl::check_finished() const {
  const bool reducing = phase == Phase::kReducing || phase == Phase::kWaiting;
  if (phase != Phase::kMisused && !(reducing && arrivals.any())) return;
  std::string text = "Expected to have finished reduction in the prior iteration before starting a new one. ";
  if (options.static_graph) {
    text +=
        "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used in "
        "first iteration, but then got unused in the second iteration. this is not compatible with static_graph set to "
        "True.";
  } else if (!options.find_unused_parameters) {
    text +=
        "Some parameters got no gradient in it: check that all `forward` function outputs participate in calculating "
        "loss, or look for unused parameters in each iteration, by passing the keyword argument "
        "`find_unused_parameters=True` to DistributedDataParallel.";
  } else {
    text +=
        "Since `find_unused_parameters=True` is enabled, this means that some outputs of forward take no part in the "
        "loss, or that forward returned tensors in a type that could not be searched.";
  }
  std::string names, indices;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (options.static_graph ? static_graph.calls_left(i) == 0 : arrivals.has_arrived(i)) continue;
    indices += c10::str(indices.empty() ? "" : " ", i);
    if (i < options.names.size()) names += c10::str(names.empty() ? "" : ", ", options.names[i]);
  }
  text += c10::str("\nParameter indices which did not receive grad for rank ", rank(), ": ", indices);
  if (!names.empty()) text += c10::str("\nParameters which did not receive grad for rank ", rank(), ": ", names);
  TORCH_CHECK(false, text);
}

void Reducer::Impl::throw_marked_twice(size_t index) const {
  const bool named = index < options.names.size();
  TORCH_CHECK(
      false, "Expected to mark a variable ready only once. Parameter at index ", index,
      named ? " with name " + options.names[index] : std::string(),
      " has been marked as ready twice in this backward: it is used outside of forward, or by several reentrant "
      "backwards (checkpoints of the same part)",
      options.find_unused_parameters ? ", or forward did not seem to use it and it got a gradient after all" : "",
      ". A static graph (_set_static_graph()) allows this if the graph is the same in every iteration.");
}

}  // namespace muster
