#include "muster/torch/reducer/reducer_verify.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <sstream>

#include "muster/torch/bytes.h"
#include "muster/torch/collectives.h"

namespace muster {
namespace {

/// A tensor of the model: "parameter 1" and "body.weight: Float[2, 3]".
struct Entry {
  std::string title, description;
};

std::string describe(const std::string& name, const at::Tensor& tensor, bool trained) {
  std::string text = name.empty() ? "" : name + ": ";
  text += c10::str(tensor.scalar_type(), tensor.sizes());
  if (trained && !tensor.requires_grad()) text += " without gradient";
  if (!tensor.device().is_cpu()) text += c10::str(" on ", tensor.device().type());
  if (tensor.layout() != c10::kStrided) return c10::str(text, ", ", tensor.layout());
  return tensor.is_contiguous() ? text : c10::str(text, " with strides ", tensor.strides());
}

/// One line for each tensor: its title, a tab and its description.
std::string describe(const ReducerContext& context) {
  const ReducerOptions& options = context.options;
  std::string text;
  const auto add = [&](const char* kind, size_t index, const std::string& description) {
    text += c10::str(kind, index, '\t', description, '\n');
  };
  for (size_t i = 0; i < options.model_parameters.size(); ++i) {
    const auto& [name, tensor] = options.model_parameters[i];
    add("parameter ", i, describe(name, tensor, true));
  }
  for (size_t i = 0; i < options.model_buffers.size(); ++i) {
    const auto& [name, tensor] = options.model_buffers[i];
    add("buffer ", i, describe(name, tensor, false));
  }
  for (size_t i = 0; i < context.parameters.size() && options.model_parameters.empty(); ++i) {
    add("parameter ", i, describe(i < options.names.size() ? options.names[i] : "", context.parameters[i], true));
  }
  return text;
}

Entry next_entry(std::istream& text) {
  Entry entry;
  std::getline(text, entry.title, '\t');
  std::getline(text, entry.description);
  return entry;
}

/// The first difference: "parameter 1 differs: rank 2 has ..., rank 0 has ...". Empty if there is none.
std::string compare(Rank rank, const std::string& here, const std::string& at_root) {
  if (here == at_root) return "";
  std::istringstream mine(here), theirs(at_root);
  Entry own, root;
  do {
    own = next_entry(mine);
    root = next_entry(theirs);
  } while (own.title == root.title && own.description == root.description);
  const std::string title = std::max(own.title, root.title);  // parameters before buffers, and both before the end
  const auto text_of = [&](const Entry& entry) { return entry.title == title ? entry.description : "none"; };
  return c10::str(title, " differs: rank ", rank, " has ", text_of(own), ", rank 0 has ", text_of(root));
}

int64_t fingerprint_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char letter : text) hash = (hash ^ static_cast<uint8_t>(letter)) * 0x100000001b3;
  return static_cast<int64_t>(hash);
}

}  // namespace

void verify_model(const ReducerContext& context) {
  Group& group = *context.group;
  const std::string here = describe(context);
  const at::Tensor prints = all_gather(group, at::scalar_tensor(fingerprint_of(here), at::kLong));
  if (prints.eq(prints[0]).all().item<bool>()) return;
  const std::string difference = compare(context.rank(), here, broadcast_text(group, here, 0));
  if (const auto failure = first_failure(group, difference)) {
    throw_error(
        {ErrorCode::kMismatch,
         "DDP expects same model across all ranks, but " + failure->text + ": build the same model at every rank",
         failure->rank});
  }
}

}  // namespace muster
