"""How Inductor compiles the operators muster::*: as collectives.

Inductor would compile them as ordinary calls otherwise. It could then write to the input of a pending operator, or use
its memory again, because it would not know that the operator reads it until the wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, register_lowering
from torch.utils import _pytree as pytree

from muster.graph._capture.operators import CHUNKED_SHAPES, SHAPES


def register() -> None:
    for name in (*SHAPES, *CHUNKED_SHAPES):
        operator = getattr(torch.ops.muster, name).default
        add_layout_constraint(operator, constrain_to_fx_strides)
        register_lowering(operator)(_collective(operator))


def _collective(operator: Any) -> Any:
    def lower(*arguments: Any) -> Any:
        return pytree.tree_map(ir.TensorBox.create, ir._CollectiveKernel.create_out_of_place(operator, *arguments))

    return lower
