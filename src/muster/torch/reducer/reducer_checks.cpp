// What went wrong, in words that torch's reducer begins with, too: programs and tests look for them.
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "muster/torch/reducer/reducer_impl.h"

namespace muster {

std::string Reducer::Impl::name_of(size_t index) const {
  if (index < options.names.size() && !options.names[index].empty()) {
    return c10::str(index, " (", options.names[index], ")");
  }
  return std::to_string(index);
}

/// The parameters that got no gradient.
std::string Reducer::Impl::missing() const {
  std::string names, indices;
  for (size_t i = 0; i < ready.size(); ++i) {
    const bool came = options.static_graph && begun ? calls_left[i] == 0 : ready[i] != 0;
    if (came) continue;
    indices += c10::str(indices.empty() ? "" : " ", i);
    if (i < options.names.size()) names += c10::str(names.empty() ? "" : ", ", options.names[i]);
  }
  const Rank rank = group->membership().rank;
  std::string text = c10::str("\nParameter indices which did not receive grad for rank ", rank, ": ", indices);
  if (!names.empty()) text += c10::str("\nParameters which did not receive grad for rank ", rank, ": ", names);
  return text;
}

void Reducer::Impl::check_finished() const {
  if (!unfinished) return;
  std::string text = "Expected to have finished reduction in the prior iteration before starting a new one. ";
  if (options.static_graph) {
    text +=
        "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used in "
        "first iteration, but then got unused in the second iteration. this is not compatible with static_graph set to "
        "True.";
  } else if (!options.find_unused_parameters) {
    text +=
        "Some parameters got no gradient in it: see that all `forward` function outputs participate in calculating "
        "loss, or look for unused parameters in each iteration, by passing the keyword argument "
        "`find_unused_parameters=True` to DistributedDataParallel.";
  } else {
    text +=
        "Since `find_unused_parameters=True` is enabled, this means that not all outputs of forward take part in the "
        "loss, or that forward returned tensors in a type that could not be searched.";
  }
  TORCH_CHECK(false, text, missing());
}

void Reducer::Impl::check_hooked() const {
  for (size_t i = 0; i < accumulators.size(); ++i) {
    TORCH_CHECK(torch::autograd::impl::try_get_grad_accumulator(parameters[i]) == accumulators[i], "parameter ",
                name_of(i),
                " has another dtype or device than when it was wrapped, or was loaded by torch::load(), and ",
                "the reducer does not see its gradients any more: make a new DistributedDataParallel after that");
  }
}

void Reducer::Impl::throw_marked_twice(size_t index) const {
  const bool named = index < options.names.size();
  TORCH_CHECK(
      false, "Expected to mark a variable ready only once. Parameter at index ", index,
      named ? " with name " + options.names[index] : std::string(),
      " has been marked as ready twice in this backward: it is used outside of forward, or by several reentrant "
      "backwards (checkpoints of the same part)",
      options.find_unused_parameters ? ", or it was taken for unused and got a gradient after all" : "",
      ". A static graph (_set_static_graph()) allows this if the graph is the same in every iteration.");
}

}  // namespace muster
