"""Makes one blocking call of an all_reduce and its wait, where nothing runs between them."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch._inductor.utils import is_collective, is_wait
from torch._inductor.virtualized import V

from muster.graph._plan import BLOCKING
from muster.graph._plan.native_calls import function_of_muster

_TYPE = "void (*)(AtenTensorHandle, const char*, const char*)"


def make_blocking(nodes: list[Any]) -> None:
    """`nodes`: of Inductor's scheduler, in their final order. Changes the code that is generated for such pairs."""
    for start, wait in itertools.pairwise(nodes):
        if (
            is_collective(start.node, getattr(torch.ops._c10d_functional, BLOCKING).default)
            and is_wait(wait.node)
            and wait.node.op_overload is torch.ops._c10d_functional.wait_tensor.default
            and _is_same(wait.node.inputs[0], start.node.inputs[0])
        ):
            start.node.codegen = functools.partial(_write_call, start.node)
            wait.node.codegen = _write_nothing


def _is_same(first: Any, second: Any) -> bool:
    """True for the same part of a buffer."""
    layouts = first.get_layout(), second.get_layout()
    parts = {(str(each.offset), str(each.size), str(each.stride)) for each in layouts}
    return first.get_name() == second.get_name() and len(parts) == 1


def _write_call(kernel: Any, wrapper: Any) -> None:
    arguments = ", ".join(kernel.codegen_args())
    if V.graph.cpp_wrapper:
        function = function_of_muster("all_reduce", "all_reduce_address", _TYPE)
        wrapper.writeline(f"{{\n{function}\nall_reduce({arguments});\n}}")
    else:
        wrapper.writeline(f"torch.ops.muster.{BLOCKING}.default({arguments})")


def _write_nothing(wrapper: Any) -> None:
    del wrapper
