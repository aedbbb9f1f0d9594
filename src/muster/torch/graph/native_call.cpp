#include "muster/torch/graph/native_call.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace muster::graph {
namespace {

const c10::OperatorHandle& operator_of(const char* name) {
  static std::mutex mutex;
  static std::map<std::string, c10::OperatorHandle, std::less<>> known;
  const std::lock_guard lock(mutex);
  auto found = known.find(std::string_view(name));
  if (found == known.end()) {
    found = known.emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first;
  }
  return found->second;
}

/// Reads arguments by their types.
class ArgumentReader {
 public:
  ArgumentReader(const AtenTensorHandle* tensors, const int64_t* numbers, const char* const* texts)
      : tensors_(tensors), numbers_(numbers), texts_(texts) {}

  c10::IValue read(const c10::Type& type) {
    switch (type.kind()) {
      case c10::TypeKind::TensorType:
        return *torch::aot_inductor::tensor_handle_to_tensor_pointer(*tensors_++);
      case c10::TypeKind::IntType:
      case c10::TypeKind::SymIntType:
        return *numbers_++;
      case c10::TypeKind::BoolType:
        return *numbers_++ != 0;
      case c10::TypeKind::StringType:
      case c10::TypeKind::AnyType:  // a group's name
        return std::string(*texts_++);
      case c10::TypeKind::OptionalType:
        return *numbers_++ == 0 ? c10::IValue() : read(*type.containedType(0));
      case c10::TypeKind::ListType: {
        const c10::TypePtr element = type.containedType(0);
        // A list of symbolic integers that are known is a list of integers.
        c10::impl::GenericList list(element->kind() == c10::TypeKind::SymIntType ? c10::IntType::get() : element);
        for (int64_t left = *numbers_++; left > 0; --left) list.push_back(read(*element));
        return list;
      }
      default:
        TORCH_CHECK_VALUE(false, "muster: compiled code cannot pass an argument of type ", type.str());
    }
  }

 private:
  const AtenTensorHandle* tensors_;
  const int64_t* numbers_;
  const char* const* texts_;
};

}  // namespace

void native_call(const char* name, const AtenTensorHandle* tensors, const int64_t* numbers, const char* const* texts,
                 AtenTensorHandle* results, int64_t count) {
  const c10::OperatorHandle& called = operator_of(name);
  ArgumentReader reader(tensors, numbers, texts);
  torch::jit::Stack stack;
  for (const c10::Argument& argument : called.schema().arguments()) stack.push_back(reader.read(*argument.real_type()));
  called.callBoxed(stack);
  std::vector<at::Tensor> returned;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) {
      returned.push_back(value.toTensor());
    } else {
      for (const at::Tensor& each : value.toTensorVector()) returned.push_back(each);
    }
  }
  TORCH_CHECK_VALUE(count <= static_cast<int64_t>(returned.size()), name, " returned ", returned.size(),
                    " tensors, not ", count);
  for (int64_t i = 0; i < count; ++i) results[i] = torch::aot_inductor::new_tensor_handle(std::move(returned[i]));
}

}  // namespace muster::graph
