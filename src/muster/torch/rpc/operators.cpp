#include "muster/torch/rpc/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "muster/torch/exception.h"
#include "muster/torch/rpc/codec.h"
#include "muster/torch/rpc/handler.h"
#include "muster/torch/rpc/references.h"

namespace muster::rpc {
namespace {

using c10::IValue;
using c10::TypeKind;
using c10::TypePtr;

[[noreturn]] void refuse(const std::string& why) { throw_error(Error{ErrorCode::kInvalidArgument, why}); }

IValue read_value(ValueReader& in, const TypePtr& type);

/// Lists are sent as Python's lists or tuples.
IValue read_list(ValueReader& in, const TypePtr& element) {
  const Tag tag = in.next();
  if (tag != Tag::kList && tag != Tag::kTuple) refuse(c10::str("expected a list, got ", name(tag)));
  c10::impl::GenericList list(element);
  for (size_t left = in.count(); left > 0; --left) list.push_back(read_value(in, element));
  return list;
}

IValue read_tuple(ValueReader& in, const std::vector<TypePtr>& elements) {
  expect_tuple(in, elements.size());
  std::vector<IValue> values;
  for (const TypePtr& element : elements) values.push_back(read_value(in, element));
  return c10::ivalue::Tuple::create(std::move(values));
}

IValue read_dict(ValueReader& in, const c10::DictType& type) {
  in.expect(Tag::kDict);
  c10::impl::GenericDict dict(type.getKeyType(), type.getValueType());
  for (size_t left = in.count(); left > 0; --left) {
    IValue key = read_value(in, type.getKeyType());
    dict.insert_or_assign(std::move(key), read_value(in, type.getValueType()));
  }
  return dict;
}

/// Reads a value of a type of a schema.
IValue read_value(ValueReader& in, const TypePtr& type) {
  switch (type->kind()) {
    case TypeKind::TensorType:
      return read<at::Tensor>(in);
    case TypeKind::BoolType:
      return read<bool>(in);
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      return read<int64_t>(in);
    case TypeKind::FloatType:
      return read<double>(in);
    case TypeKind::NumberType:
      if (in.peek() == Tag::kInt) return read<int64_t>(in);
      if (in.peek() == Tag::kTrue || in.peek() == Tag::kFalse) return read<bool>(in);
      return read<double>(in);
    case TypeKind::StringType:
      return read<std::string>(in);
    case TypeKind::DeviceObjType:
      return at::Device(read<std::string>(in));
    case TypeKind::NoneType:
      return in.expect(Tag::kNone), IValue();
    case TypeKind::OptionalType:
      if (in.peek() == Tag::kNone) return in.next(), IValue();
      return read_value(in, type->expectRef<c10::OptionalType>().getElementType());
    case TypeKind::ListType:
      return read_list(in, type->expectRef<c10::ListType>().getElementType());
    case TypeKind::TupleType:
      return read_tuple(in, type->expectRef<c10::TupleType>().elements().vec());
    case TypeKind::DictType:
      return read_dict(in, type->expectRef<c10::DictType>());
    default:
      refuse("a value of type " + type->repr_str() + " cannot travel");
  }
}

void write_value(ValueWriter& out, const IValue& value) {
  if (value.isNone() || (value.isTensor() && !value.toTensor().defined())) return out.put_none();
  if (value.isTensor()) return out.put_tensor(value.toTensor());
  if (value.isBool()) return out.put_bool(value.toBool());
  if (value.isInt()) return out.put_int(value.toInt());
  if (value.isDouble()) return out.put_float(value.toDouble());
  if (value.isString()) return out.put_string(value.toStringView());
  if (value.isList()) {
    const auto list = value.toList();
    out.begin_list(list.size());
    for (const IValue& item : list) write_value(out, item);
    return;
  }
  if (value.isTuple()) {
    const auto& items = value.toTupleRef().elements();
    out.begin_tuple(items.size());
    for (const IValue& item : items) write_value(out, item);
    return;
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    out.begin_dict(dict.size());
    for (const auto& item : dict) {
      write_value(out, item.key());
      write_value(out, item.value());
    }
    return;
  }
  refuse("a " + value.tagKind() + " cannot travel");
}

/// Reads the argument for a parameter, and names it in errors.
IValue read_argument(ValueReader& in, const c10::Argument& parameter) {
  try {
    return read_value(in, parameter.type());
  } catch (ArgumentException& error) {
    error.add_context("argument " + parameter.name());
    throw;
  }
}

/// Reads the arguments of a call, by position and by name, in the order of the schema.
std::vector<IValue> read_arguments(ValueReader& in, const c10::FunctionSchema& schema) {
  const auto& parameters = schema.arguments();
  std::vector<std::optional<IValue>> given(parameters.size());
  in.expect(Tag::kTuple);
  const size_t count = in.count();
  const auto named =
      std::find_if(parameters.begin(), parameters.end(), [](const auto& each) { return each.kwarg_only(); });
  const auto most = static_cast<size_t>(named - parameters.begin());
  if (count > most) refuse(c10::str(schema.name(), "() takes ", most, " arguments by position, got ", count));
  for (size_t i = 0; i < count; ++i) given[i] = read_argument(in, parameters[i]);
  in.expect(Tag::kDict);
  for (size_t left = in.count(); left > 0; --left) {
    const auto name = read<std::string>(in);
    const auto index = schema.argumentIndexWithName(name);
    if (!index) refuse(schema.name() + "() has no argument " + name);
    if (given[*index]) refuse(schema.name() + "() got the argument " + name + " twice");
    given[*index] = read_argument(in, parameters[*index]);
  }
  in.finish();
  std::vector<IValue> arguments;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!given[i]) given[i] = parameters[i].default_value();
    if (!given[i]) refuse(schema.name() + "() needs the argument " + parameters[i].name());
    arguments.push_back(std::move(*given[i]));
  }
  return arguments;
}

}  // namespace

Result<> add_operator(const std::shared_ptr<RefService>& refs, const std::shared_ptr<Autograd>& autograd,
                      const std::string& function, const std::string& name, Autograd::Describe describe) {
  const auto found = c10::Dispatcher::singleton().findSchema(torch::jit::parseName(name));
  if (!found) return fail(ErrorCode::kNotFound, "torch has no operator \"" + name + "\"");
  const auto call = [op = *found](ValueReader& in, const Request& request, const auto& service, const auto& responder) {
    expect_parts(in, 2);
    torch::jit::Stack stack = read_arguments(in, op.schema());
    op.callBoxed(stack);
    ValueWriter out(CurrentContext::current());
    // As in Python: None, the value, or a tuple of several.
    write_value(out, stack.empty()       ? IValue()
                     : stack.size() == 1 ? stack.front()
                                         : c10::ivalue::Tuple::create(std::move(stack)));
    reply_with_refs(*service, responder, request.from.name, std::move(out));
  };
  return refs->agent().add_function(function, handler_in_context(refs, autograd, call, describe), {});
}

}  // namespace muster::rpc
