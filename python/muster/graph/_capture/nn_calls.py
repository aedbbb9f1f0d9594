"""The calls of torch.distributed.nn.functional, which have gradients, in the form that Dynamo can trace.

torch refuses them inside a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp

from muster.graph._capture.calls import Tensors, _flat, _group, _op, _root, _sizes, _splits
from muster.graph._capture.checks import check_count, check_dtypes, check_parts
from muster.graph._capture.operators import _wait


def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None) -> torch.Tensor:
    return _wait(torch.ops._c10d_functional.all_reduce(tensor, _op(op), _group(group).group_name))


def reduce(tensor: torch.Tensor, dst: int, op: Any = ReduceOp.SUM, group: Any = None) -> torch.Tensor:
    group = _group(group)
    return _wait(torch.ops.muster.reduce(tensor, _op(op), _root(group, dst, None, "dst"), group.group_name))


def broadcast(tensor: torch.Tensor, src: int, group: Any = None) -> torch.Tensor:
    group = _group(group)
    return _wait(torch.ops.muster.broadcast(tensor, _root(group, src, None, "src"), group.group_name))


def gather(tensor: torch.Tensor, dst: int = 0, group: Any = None) -> tuple[torch.Tensor, ...]:
    group = _group(group)
    root = _root(group, dst, None, "dst")
    parts = _wait(torch.ops.muster.gather(tensor, root, group.rank(), group.group_name))
    # Other ranks get zeros. These depend on the call, too, so that all ranks take part in its gradient.
    zeros = tensor.new_zeros([group.size() - parts.shape[0], *tensor.shape])
    return tuple(torch.cat([parts, zeros]).unbind())


def scatter(tensors: Tensors, src: int = 0, group: Any = None) -> torch.Tensor:
    group = _group(group)
    root = _root(group, src, None, "src")
    parts = torch.stack(list(tensors)) if group.rank() == root else torch.stack(list(tensors))[:0]
    return _wait(torch.ops.muster.scatter(parts, root, group.group_name))


def reduce_scatter(
    output: torch.Tensor, input_list: Tensors, op: Any = ReduceOp.SUM, group: Any = None
) -> torch.Tensor:
    group = _group(group)
    check_parts("reduce_scatter", "input_list", input_list, output, group)
    pending = torch.ops._c10d_functional_autograd.reduce_scatter_tensor(
        _flat(list(input_list)), _op(op), group.size(), group.group_name
    )
    return _wait(pending).view(output.shape)


def all_gather(tensor: torch.Tensor, group: Any = None) -> tuple[torch.Tensor, ...]:
    group = _group(group)
    pending = torch.ops._c10d_functional_autograd.all_gather_into_tensor(
        tensor.reshape(-1), group.size(), group.group_name
    )
    return tuple(_wait(pending).view(group.size(), *tensor.shape).unbind())


def all_to_all(output_tensor_list: Tensors, input_tensor_list: Tensors, group: Any = None) -> tuple[torch.Tensor, ...]:
    group = _group(group)
    check_count("all_to_all", "output_tensor_list", output_tensor_list, group)
    check_count("all_to_all", "input_tensor_list", input_tensor_list, group)
    check_dtypes("all_to_all", *input_tensor_list, *output_tensor_list)
    sizes = _sizes(output_tensor_list)
    pending = torch.ops._c10d_functional_autograd.all_to_all_single(
        _flat(list(input_tensor_list)),
        sizes,
        _sizes(input_tensor_list),
        group.group_name,
    )
    parts = _wait(pending).split(sizes)
    return tuple(part.view(like.shape) for part, like in zip(parts, output_tensor_list, strict=True))


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
) -> torch.Tensor:
    group = _group(group)
    pending = torch.ops._c10d_functional_autograd.all_to_all_single(
        input,
        _splits(output, output_split_sizes, group, "output"),
        _splits(input, input_split_sizes, group, "input"),
        group.group_name,
    )
    return _wait(pending)


CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "broadcast": broadcast,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
}
