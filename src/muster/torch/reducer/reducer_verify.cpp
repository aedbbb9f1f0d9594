#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

#include "muster/base/hash.h"
#include "muster/torch/archive_exchange.h"
#include "muster/torch/collectives.h"
#include "muster/torch/reducer/reducer_buckets.h"

namespace muster {
namespace {

std::string describe(const std::string& name, const at::Tensor& tensor, bool trained) {
  std::string text = name.empty() ? "" : name + ": ";
  text += c10::str(tensor.scalar_type(), tensor.sizes());
  if (trained && !tensor.requires_grad()) text += " without gradient";
  if (!tensor.device().is_cpu()) text += c10::str(" on ", tensor.device().type());
  if (tensor.layout() != c10::kStrided) return c10::str(text, ", ", tensor.layout());
  return tensor.is_contiguous() ? text : c10::str(text, " with strides ", tensor.strides());
}

/// An empty line, then one for each tensor: its title, a tab and its description.
std::string describe(const ReducerContext& context) {
  const ReducerOptions& options = context.options;
  NamedTensors own;
  for (size_t i = 0; i < context.parameters.size(); ++i) {
    own.emplace_back(i < options.names.size() ? options.names[i] : "", context.parameters[i]);
  }
  std::string text = "\n";
  const auto add = [&text](const char* kind, const NamedTensors& tensors, bool trained) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      text += c10::str(kind, i, '\t', describe(tensors[i].first, tensors[i].second, trained), '\n');
    }
  };
  add("parameter ", options.model_parameters.empty() ? own : options.model_parameters, true);
  add("buffer ", options.model_buffers, false);
  return text;
}

/// The first difference: "parameter 1 differs: rank 2 has ..., rank 0 has ...". Empty if there is none.
std::string compare(Rank rank, const std::string& here, const std::string& at_root) {
  if (here == at_root) return "";
  const auto first = std::mismatch(here.begin(), here.end(), at_root.begin(), at_root.end()).first;
  const size_t begin = here.rfind('\n', static_cast<size_t>(first - here.begin()) - 1) + 1;
  const auto line_of = [begin](const std::string& text) { return text.substr(begin, text.find('\n', begin) - begin); };
  // The two lines may have different titles. The greater string comes first in the full list: parameters come before
  // buffers, and both before the end of the text.
  const std::string line = std::max(line_of(here), line_of(at_root)), title = line.substr(0, line.find('\t') + 1);
  const auto description_of = [&](const std::string& each) {
    return each.starts_with(title) ? each.substr(title.size()) : "none";
  };
  return c10::str(title.substr(0, title.size() - 1), " differs: rank ", rank, " has ", description_of(line_of(here)),
                  ", rank 0 has ", description_of(line_of(at_root)));
}

}  // namespace

void ReducerContext::verify_model() const {
  const std::string here = describe(*this);
  const at::Tensor prints = all_gather(*group, at::scalar_tensor(static_cast<int64_t>(fnv1a(here)), at::kLong));
  if (prints.eq(prints[0]).all().item<bool>()) return;
  const std::string difference = compare(rank(), here, broadcast_text(*group, here, 0));
  if (const auto failure = first_failure(*group, difference)) {
    throw_error(
        {ErrorCode::kMismatch,
         "DDP expects same model across all ranks, but " + failure->text + ": build the same model at every rank",
         failure->rank});
  }
}

}  // namespace muster
