"""Shapes and gradients of the operators muster::* (src/muster/torch/graph/operators.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d


def _group(group_name: str) -> Any:
    return c10d._resolve_process_group(group_name)  # type: ignore[arg-type]  # a NewType in some releases


def _rank(group_name: str) -> int:
    return int(_group(group_name).rank())


def _size(group_name: str) -> int:
    return int(_group(group_name).size())


def _reduce(tensor: torch.Tensor, reduce_op: str, root: int, group_name: str) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _broadcast(tensor: torch.Tensor, root: int, group_name: str) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _gather(tensor: torch.Tensor, root: int, rank: int, group_name: str) -> torch.Tensor:
    count = _size(group_name) if rank == root else 0
    return tensor.new_empty([count, *tensor.shape])


def _scatter(tensor: torch.Tensor, root: int, group_name: str) -> torch.Tensor:
    return tensor.new_empty(tensor.shape[1:])


def _all_gather_uneven(tensor: torch.Tensor, split_sizes: list[int], group_name: str) -> torch.Tensor:
    return tensor.new_empty([sum(split_sizes), *tensor.shape[1:]])


def _reduce_scatter_uneven(
    tensor: torch.Tensor, split_sizes: list[int], reduce_op: str, rank: int, group_name: str
) -> torch.Tensor:
    return tensor.new_empty([split_sizes[rank], *tensor.shape[1:]])


def _barrier(like: torch.Tensor, group_name: str) -> torch.Tensor:
    return like.new_empty([0])


def _exchange(
    tensors: list[torch.Tensor], sends: list[bool], peers: list[int], tags: list[int], number: int, group_name: str
) -> list[torch.Tensor]:
    return [
        tensor.new_empty([0]) if is_send else tensor.new_empty(tensor.shape)
        for tensor, is_send in zip(tensors, sends, strict=True)
    ]


SHAPES: dict[str, Callable[..., Any]] = {
    "reduce": _reduce,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_gather_uneven": _all_gather_uneven,
    "reduce_scatter_uneven": _reduce_scatter_uneven,
    "barrier": _barrier,
    "exchange": _exchange,
}


# ---- products and messages in chunks of rows, which _rewrite/chunks.py puts into graphs


def _matmul_all_reduce(
    rows: torch.Tensor, weights: torch.Tensor, bias: Any, reduce_op: str, chunks: int, group_name: str
) -> torch.Tensor:
    return rows.new_empty([rows.shape[0], weights.shape[1]])


def _matmul_reduce_scatter(
    rows: torch.Tensor, weights: torch.Tensor, bias: Any, reduce_op: str, ranks: int, chunks: int, group_name: str
) -> torch.Tensor:
    return rows.new_empty([rows.shape[0] // ranks, weights.shape[1]])


def _all_gather_chunks(own_rows: torch.Tensor, ranks: int, chunks: int, group_name: str) -> torch.Tensor:
    return own_rows.new_empty([ranks * own_rows.shape[0], own_rows.shape[1]])


def _chunks_matmul(
    gathered: torch.Tensor,
    own_rows: torch.Tensor,
    chunks: int,
    weights: list[torch.Tensor],
    biases: list[Any],
    whole: bool,
) -> list[torch.Tensor]:
    widths = [each.shape[1] for each in weights] + ([own_rows.shape[1]] if whole else [])
    return [own_rows.new_empty([gathered.shape[0], width]) for width in widths]


CHUNKED_SHAPES: dict[str, Callable[..., Any]] = {
    "matmul_all_reduce": _matmul_all_reduce,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "all_gather_chunks": _all_gather_chunks,
}


# ---- gradients: each operator is linear, and its gradient is the transposed operator


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.arguments = inputs[1:]


def _wait(pending: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(pending)


def _factor(reduce_op: str, group_name: str) -> float:
    if reduce_op not in ("sum", "avg"):
        raise RuntimeError(f'muster: a reduction by "{reduce_op}" has no gradient, only "sum" and "avg"')
    return 1.0 if reduce_op == "sum" else 1.0 / _size(group_name)


def _reduce_gradient(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    reduce_op, root, group_name = context.arguments
    factor = _factor(reduce_op, group_name)
    whole = _wait(torch.ops._c10d_functional.broadcast(gradient.contiguous(), root, group_name))
    return whole * factor, None, None, None


def _broadcast_gradient(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    root, group_name = context.arguments
    whole = _wait(torch.ops.muster.reduce(gradient.contiguous(), "sum", root, group_name))
    return whole if _rank(group_name) == root else torch.zeros_like(gradient), None, None


def _gather_gradient(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    root, _, group_name = context.arguments
    return _wait(torch.ops.muster.scatter(gradient.contiguous(), root, group_name)), None, None, None


def _scatter_gradient(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    root, group_name = context.arguments
    return _wait(torch.ops.muster.gather(gradient.contiguous(), root, _rank(group_name), group_name)), None, None


def _all_gather_uneven_gradient(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    split_sizes, group_name = context.arguments
    part = torch.ops.muster.reduce_scatter_uneven(
        gradient.contiguous(), split_sizes, "sum", _rank(group_name), group_name
    )
    return _wait(part), None, None


def _reduce_scatter_uneven_gradient(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    split_sizes, reduce_op, _, group_name = context.arguments
    factor = _factor(reduce_op, group_name)
    whole = _wait(torch.ops.muster.all_gather_uneven(gradient.contiguous(), split_sizes, group_name))
    return whole * factor, None, None, None, None


GRADIENTS: dict[str, Callable[..., Any]] = {
    "reduce": _reduce_gradient,
    "broadcast": _broadcast_gradient,
    "gather": _gather_gradient,
    "scatter": _scatter_gradient,
    "all_gather_uneven": _all_gather_uneven_gradient,
    "reduce_scatter_uneven": _reduce_scatter_uneven_gradient,
}


def register() -> None:
    for name, shape in {**SHAPES, **CHUNKED_SHAPES, "chunks_matmul": _chunks_matmul}.items():
        torch.library.register_fake(f"muster::{name}", shape)
    for name, gradient in GRADIENTS.items():
        torch.library.register_autograd(f"muster::{name}", gradient, setup_context=_save)
