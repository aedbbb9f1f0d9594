"""Collectives with a part of another size for each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from muster.graph._capture.calls import _group, _op


def all_gather_into_tensor_uneven(input: torch.Tensor, split_sizes: list[int], group: Any = None) -> torch.Tensor:
    """Concatenates the tensors of all ranks in dimension 0; rank r's has split_sizes[r] rows. Has a gradient.

    All other dimensions are equal at all ranks. Inside a compiled graph it is one operator.
    """
    group = _group(group)
    _check_count(split_sizes, group, "all_gather_into_tensor_uneven")
    _check_rows(input, split_sizes[group.rank()], group, "all_gather_into_tensor_uneven")
    pending = torch.ops.muster.all_gather_uneven(input, split_sizes, group.group_name)
    return torch.ops._c10d_functional.wait_tensor(pending)


def reduce_scatter_tensor_uneven(
    input: torch.Tensor, split_sizes: list[int], op: Any = ReduceOp.SUM, group: Any = None
) -> torch.Tensor:
    """Reduces the tensors of all ranks, which have the same shape. Returns this rank's rows.

    Rank r gets split_sizes[r] rows, in the order of the ranks. Has a gradient for SUM and AVG.
    """
    group = _group(group)
    _check_count(split_sizes, group, "reduce_scatter_tensor_uneven")
    _check_rows(input, sum(split_sizes), group, "reduce_scatter_tensor_uneven")
    pending = torch.ops.muster.reduce_scatter_uneven(input, split_sizes, _op(op), group.rank(), group.group_name)
    return torch.ops._c10d_functional.wait_tensor(pending)


def _check_count(split_sizes: list[int], group: dist.ProcessGroup, title: str) -> None:
    if len(split_sizes) != group.size():
        raise ValueError(f"{title}: split_sizes has {len(split_sizes)} numbers for {group.size()} ranks")


def _check_rows(tensor: torch.Tensor, expected: int, group: dist.ProcessGroup, title: str) -> None:
    if tensor.shape[0] != expected:
        raise ValueError(
            f"{title}: the tensor of rank {group.rank()} has {tensor.shape[0]} rows, not {expected} as in split_sizes"
        )
