"""torch.distributed's calls in the form that Dynamo can trace. Each function has the arguments of torch's call.

A call becomes an operator and a wait: torch's own operator where there is one, so that Inductor's passes see it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from muster.graph._capture.checks import check_count, check_dtypes, check_parts, check_size, check_whole
from muster.graph._capture.pending import CoalescingManager, begin
from muster.graph._capture.work import Future, Work

_REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
Tensors = list[torch.Tensor]


def _is_outside(group: Any) -> bool:
    return group is dist.GroupMember.NON_GROUP_MEMBER


def _group(group: Any) -> Any:
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("the default process group has not been initialized: call init_process_group() first")
    return group


def _op(op: Any) -> str:
    """`op`: torch's, or that of a package which has the same names."""
    if op.name not in _REDUCE_OPS:
        raise ValueError(f"muster: a compiled graph cannot reduce by {op.name}, only by {', '.join(_REDUCE_OPS)}")
    return op.name.lower()


def _root(group: Any, rank: int | None, group_rank: int | None, what: str) -> int:
    """The rank in the group."""
    if group_rank is not None:
        if rank is not None:
            raise ValueError(f"give {what} or group_{what}, not both")
        return group_rank
    if rank is None:
        raise ValueError(f"give {what} or group_{what}")
    return dist.get_group_rank(group, rank)


def _list_at_root(tensors: Tensors | None, is_root: bool, what: str) -> Tensors:
    if is_root != bool(tensors):
        raise ValueError(f"the root, and only the root, needs {what}")
    return tensors or []


def _end(pending: Tensors, targets: list[Tensors], async_op: bool) -> Work | None:
    work = Work(pending, targets)
    if async_op:
        return begin(work)
    work.wait()
    return None


def _future(work: Work, value: Tensors, async_op: bool) -> Future | None:
    """What the coalesced calls return: torch returns a future for them, not a Work."""
    if async_op:
        return begin(work).get_future().then(lambda done: value)
    work.wait()
    return None


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _sizes(tensors: Tensors) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _are_equal(sizes: list[int]) -> bool:
    return all(size == sizes[0] for size in sizes)


# ---- reductions


def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Work | None:
    if _is_outside(group):
        return None
    tensor = _real(tensor)
    pending = torch.ops._c10d_functional.all_reduce(tensor, _op(op), _group(group).group_name)
    return _end([pending], [[tensor]], async_op)


def all_reduce_coalesced(
    tensors: Tensors, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Future | None:
    if _is_outside(group):
        return None
    tensors = [_real(tensor) for tensor in tensors]
    check_dtypes("all_reduce_coalesced", *tensors)
    pending = torch.ops._c10d_functional.all_reduce_coalesced(tensors, _op(op), _group(group).group_name)
    return _future(Work(pending, [[tensor] for tensor in tensors]), tensors, async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    if _is_outside(group):
        return None
    group = _group(group)
    tensor = _real(tensor)
    pending = torch.ops.muster.reduce(tensor, _op(op), _root(group, dst, group_dst, "dst"), group.group_name)
    return _end([pending], [[tensor]], async_op)


def reduce_scatter(
    output: torch.Tensor, input_list: Tensors, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    if _is_outside(group):
        return None
    group = _group(group)
    sizes = _sizes(input_list)
    check_count("reduce_scatter", "input_list", input_list, group)
    check_dtypes("reduce_scatter", output, *input_list)
    check_size("reduce_scatter", "output", output.numel(), sizes[group.rank()])
    if _are_equal(sizes):
        pending = torch.ops._c10d_functional.reduce_scatter_tensor(
            _flat(input_list), _op(op), group.size(), group.group_name
        )
    else:
        pending = torch.ops.muster.reduce_scatter_uneven(
            _flat(input_list), sizes, _op(op), group.rank(), group.group_name
        )
    return _end([pending], [[output]], async_op)


def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    if _is_outside(group):
        return None
    group = _group(group)
    check_whole("reduce_scatter_tensor", "input", input, output, group)
    rows = input if input.dim() == output.dim() else input.reshape(-1)
    pending = torch.ops._c10d_functional.reduce_scatter_tensor(rows, _op(op), group.size(), group.group_name)
    return _end([pending], [[output]], async_op)


# ---- from one rank, and to one rank


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    if _is_outside(group):
        return None
    group = _group(group)
    tensor = _real(tensor)
    pending = torch.ops._c10d_functional.broadcast(tensor, _root(group, src, group_src, "src"), group.group_name)
    return _end([pending], [[tensor]], async_op)


def gather(
    tensor: torch.Tensor,
    gather_list: Tensors | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    if _is_outside(group):
        return None
    if gather_list:
        check_parts("gather", "gather_list", gather_list, tensor, _group(group))
    return _gather(tensor, gather_list, dst, group, async_op, group_dst)


def gather_single(
    tensor: torch.Tensor,
    gather_tensor: torch.Tensor | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    if _is_outside(group):
        return None
    if gather_tensor is not None:
        check_whole("gather_single", "gather_tensor", gather_tensor, tensor, _group(group))
    return _gather(tensor, None if gather_tensor is None else [gather_tensor], dst, group, async_op, group_dst)


def _gather(
    tensor: torch.Tensor, targets: Tensors | None, dst: int | None, group: Any, async_op: bool, group_dst: int | None
) -> Work | None:
    group = _group(group)
    root = _root(group, 0 if dst is None and group_dst is None else dst, group_dst, "dst")
    pending = torch.ops.muster.gather(tensor, root, group.rank(), group.group_name)
    return _end([pending], [_list_at_root(targets, group.rank() == root, "gather_list")], async_op)


def scatter(
    tensor: torch.Tensor,
    scatter_list: Tensors | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    if _is_outside(group):
        return None
    group = _group(group)
    root = _root(group, 0 if src is None and group_src is None else src, group_src, "src")
    parts = _list_at_root(scatter_list, group.rank() == root, "scatter_list")
    if parts:
        check_parts("scatter", "scatter_list", parts, tensor, group)
    stacked = torch.stack(parts) if parts else tensor.new_empty([0, *tensor.shape])
    return _end([torch.ops.muster.scatter(stacked, root, group.group_name)], [[tensor]], async_op)


# ---- from all ranks to all ranks


def all_gather(tensor_list: Tensors, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Work | None:
    if _is_outside(group):
        return None
    group = _group(group)
    sizes = _sizes(tensor_list)
    check_count("all_gather", "tensor_list", tensor_list, group)
    check_dtypes("all_gather", tensor, *tensor_list)
    check_size("all_gather", f"tensor_list[{group.rank()}]", sizes[group.rank()], tensor.numel())
    if _are_equal(sizes):
        pending = torch.ops._c10d_functional.all_gather_into_tensor(tensor.reshape(-1), group.size(), group.group_name)
    else:
        pending = torch.ops.muster.all_gather_uneven(tensor.reshape(-1), sizes, group.group_name)
    return _end([pending], [tensor_list], async_op)


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Work | None:
    if _is_outside(group):
        return None
    group = _group(group)
    check_whole("all_gather_into_tensor", "output_tensor", output_tensor, input_tensor, group)
    rows = input_tensor if input_tensor.dim() == output_tensor.dim() else input_tensor.reshape(-1)
    pending = torch.ops._c10d_functional.all_gather_into_tensor(rows, group.size(), group.group_name)
    return _end([pending], [[output_tensor]], async_op)


def all_gather_coalesced(
    output_tensor_lists: list[Tensors], input_tensor_list: Tensors, group: Any = None, async_op: bool = False
) -> Future | None:
    if _is_outside(group):
        return None
    group = _group(group)
    inputs = [_real(tensor) for tensor in input_tensor_list]
    outputs = [[_real(tensor) for tensor in tensors] for tensors in output_tensor_lists]  # by rank, then by input
    check_count("all_gather_coalesced", "output_tensor_lists", outputs, group)
    for rank, tensors in enumerate(outputs):
        if len(tensors) != len(inputs):
            raise ValueError(
                f"all_gather_coalesced: output_tensor_lists[{rank}] has {len(tensors)} tensors for {len(inputs)} inputs"
            )
    by_input = [[tensors[i] for tensors in outputs] for i in range(len(inputs))]
    check_dtypes("all_gather_coalesced", *inputs)
    for i, (tensor, parts) in enumerate(zip(inputs, by_input, strict=True)):
        check_parts("all_gather_coalesced", f"the list of outputs for input {i}", parts, tensor, group)
    flat = [tensor.reshape(-1) for tensor in inputs]
    pending = torch.ops._c10d_functional.all_gather_into_tensor_coalesced(flat, group.size(), group.group_name)
    return _future(Work(pending, by_input), [tensor for tensors in outputs for tensor in tensors], async_op)


def all_to_all(
    output_tensor_list: Tensors, input_tensor_list: Tensors, group: Any = None, async_op: bool = False
) -> Work | None:
    if _is_outside(group):
        return None
    group = _group(group)
    check_count("all_to_all", "output_tensor_list", output_tensor_list, group)
    check_count("all_to_all", "input_tensor_list", input_tensor_list, group)
    check_dtypes("all_to_all", *input_tensor_list, *output_tensor_list)
    pending = torch.ops._c10d_functional.all_to_all_single(
        _flat(input_tensor_list), _sizes(output_tensor_list), _sizes(input_tensor_list), group.group_name
    )
    return _end([pending], [output_tensor_list], async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Work | None:
    if _is_outside(group):
        return None
    group = _group(group)
    check_dtypes("all_to_all_single", input, output)
    pending = torch.ops._c10d_functional.all_to_all_single(
        input,
        _splits(output, output_split_sizes, group, "output"),
        _splits(input, input_split_sizes, group, "input"),
        group.group_name,
    )
    return _end([pending], [[output]], async_op)


def _splits(tensor: torch.Tensor, sizes: list[int] | None, group: Any, what: str) -> list[int]:
    if sizes:
        check_count("all_to_all_single", f"{what}_split_sizes", sizes, group)
        return list(sizes)
    if tensor.shape[0] % group.size() != 0:
        raise ValueError(
            f"all_to_all_single: the {what} has {tensor.shape[0]} rows, which cannot be split evenly "
            f"among {group.size()} ranks"
        )
    return [tensor.shape[0] // group.size()] * group.size()


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> Work | None:
    if _is_outside(group):
        return None
    return _end([torch.ops.muster.barrier(torch.empty(0), _group(group).group_name)], [[]], async_op)


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: Any = False) -> Work | None:
    return barrier(group)


# ---- messages


_numbers: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()  # by the graph that is traced


def _next_number() -> int:
    """Of the calls of a graph. torch merges equal calls, but two equal messages are two messages."""
    context = torch._guards.TracingContext.try_get()
    return 0 if context is None else next(_numbers.setdefault(context, itertools.count()))


# The compiler calls it. torch.compiler.assume_constant_result() would import the compiler.
_next_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _exchange(ops: list[dist.P2POp]) -> list[Work]:
    group = _group(ops[0].group)
    sends = [op.op is dist.isend for op in ops]
    pending = torch.ops.muster.exchange(
        [op.tensor for op in ops],
        sends,
        [op.group_peer for op in ops],
        [op.tag for op in ops],
        _next_number(),
        group.group_name,
    )
    return [
        begin(Work([result], [[] if is_send else [op.tensor]], dist.get_global_rank(group, op.group_peer)))
        for op, result, is_send in zip(ops, pending, sends, strict=True)
    ]


def batch_isend_irecv(p2p_op_list: Any) -> list[Work]:
    return _exchange(p2p_op_list)


def isend(
    tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
) -> Work | None:
    if _is_outside(group):
        return None
    return _exchange([dist.P2POp(dist.isend, tensor, dst, group, tag, group_dst)])[0]


def irecv(
    tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
) -> Work | None:
    if _is_outside(group):
        return None
    if src is None and group_src is None:
        raise ValueError("muster: a compiled graph cannot receive from any rank; give src or group_src")
    return _exchange([dist.P2POp(dist.irecv, tensor, src, group, tag, group_src)])[0]


def send(
    tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
) -> None:
    work = isend(tensor, dst, group, tag, group_dst)
    if work is not None:
        work.wait()


def recv(
    tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
) -> int:
    work = irecv(tensor, src, group, tag, group_src)
    if work is None:
        return -1
    work.wait()
    return work.source_rank()


def _coalescing_manager(group: Any = None, device: Any = None, async_ops: Any = False) -> CoalescingManager:
    return CoalescingManager(async_ops)


def _breaking(name: str) -> Callable[..., Any]:
    message = f"torch.distributed.{name}() sends Python objects, which a graph cannot hold. Call it outside the graph."

    def call(*arguments: Any, **named: Any) -> None:
        torch._dynamo.graph_break(message)

    return call


# By the name in torch.distributed. Not every release has all of them.
CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": all_reduce,
    "all_reduce_coalesced": all_reduce_coalesced,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "broadcast": broadcast,
    "gather": gather,
    "gather_single": gather_single,
    "scatter": scatter,
    "all_gather": all_gather,
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_gather_coalesced": all_gather_coalesced,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "barrier": barrier,
    "monitored_barrier": monitored_barrier,
    "batch_isend_irecv": batch_isend_irecv,
    "isend": isend,
    "irecv": irecv,
    "send": send,
    "recv": recv,
    "all_gather_single": all_gather_into_tensor,
    "_all_gather_base": all_gather_into_tensor,
    "reduce_scatter_single": reduce_scatter_tensor,
    "_reduce_scatter_base": reduce_scatter_tensor,
    "_coalescing_manager": _coalescing_manager,
}
OBJECT_CALLS = {
    name: _breaking(name)
    for name in (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    )
}
