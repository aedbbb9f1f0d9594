"""Writes the calls of collectives in the C++ code of a package.

Inductor would call most of them through a proxy, which reads the call from a description at run time. The calls that
are written here go to native_call() (src/muster/torch/graph/native_call.h).
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch._inductor.virtualized import V

from muster.graph._plan import NAMESPACES

_TYPE = "void (*)(const char*, const AtenTensorHandle*, const int64_t*, const char* const*, AtenTensorHandle*, int64_t)"
# Asks the dispatcher once for the function, because the compiled library is not linked with muster.
_FUNCTION = """static const auto {name} = [] {{
  StableIValue address = 0;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_call_dispatcher("muster::{operator}", "", &address));
  return reinterpret_cast<{type}>(address);
}}();"""


def function_of_muster(name: str, operator: str, type: str) -> str:
    """C++ code that defines `name`: a function of this type, at the address that muster::`operator` returns."""
    return _FUNCTION.format(name=name, operator=operator, type=type)


def make_native(nodes: list[Any]) -> None:
    """`nodes`: of Inductor's scheduler. Changes the code that is generated for collectives in a package."""
    if not V.graph.aot_mode:
        return
    for node in nodes:
        kernel = node.node
        called = getattr(kernel, "op_overload", None)
        if isinstance(called, torch._ops.OpOverload) and called.namespace in NAMESPACES and not _has_shim(called):
            kernel.codegen = functools.partial(_write_call, kernel)


def _has_shim(called: torch._ops.OpOverload) -> bool:
    """True for what Inductor calls directly, and for what is one call with its wait (blocking.py)."""
    return called.name().partition("::")[2] in ("all_reduce", "all_reduce_", "wait_tensor")


class _Arguments:
    """In the three arrays that native_call() takes, as text."""

    def __init__(self, wrapper: Any):
        self._wrapper = wrapper
        self.tensors: list[str] = []
        self.numbers: list[str] = []
        self.texts: list[str] = []

    def add(self, value: Any, kind: Any) -> None:
        if isinstance(kind, torch.OptionalType):
            self.numbers.append(str(int(value is not None)))
            if value is not None:
                self.add(value, kind.getElementType())
        elif isinstance(kind, torch.ListType):
            self.numbers.append(str(len(value)))
            for each in value:
                self.add(each, kind.getElementType())
        elif isinstance(kind, torch.TensorType):
            self.tensors.append(value.codegen_reference())
        elif isinstance(value, str):  # of an operator of torch, the group's name may be of any type
            self.texts.append(json.dumps(value))
        else:
            self.numbers.append(
                f"int64_t({self._wrapper.codegen_sizevar(value)})" if not isinstance(value, bool) else str(int(value))
            )


def _write_call(kernel: Any, wrapper: Any) -> None:
    called = kernel.op_overload
    given, named = kernel.unflatten_args(kernel.inputs, kernel.constant_args)
    named = {**named, **kernel.kwargs}
    arguments = _Arguments(wrapper)
    for place, argument in enumerate(called._schema.arguments):
        value = given[place] if place < len(given) else named.get(argument.name, argument.default_value)
        arguments.add(value, argument.real_type)
    results = [each.get_name() for each in getattr(kernel, "outputs", None) or ()]
    name = kernel.get_name()
    wrapper.writeline(function_of_muster(f"muster_call_{name}", "native_call_address", _TYPE))
    wrapper.writeline(f"std::array<AtenTensorHandle, {max(len(results), 1)}> {name}_results;")
    arrays = ", ".join(
        f"std::array<{kind}, {max(len(values), 1)}>{{{', '.join(values)}}}.data()"
        for kind, values in (
            ("AtenTensorHandle", arguments.tensors),
            ("int64_t", arguments.numbers),
            ("const char*", arguments.texts),
        )
    )
    wrapper.writeline(f'muster_call_{name}("{called.name()}", {arrays}, {name}_results.data(), {len(results)});')
    for place, result in enumerate(results):
        wrapper.writeline(f"RAIIAtenTensorHandle {result}({name}_results[{place}]);")
