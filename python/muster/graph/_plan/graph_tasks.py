"""The tasks of a graph that Inductor has traced, before it makes kernels of it."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from muster.graph._plan import NAMESPACES
from muster.graph._plan.costs import KERNEL_SECONDS, Costs
from muster.graph._plan.schedule import Kind, Task, order, timeline

_GATHER = torch.ops.muster.all_gather_chunks.default
_MULTIPLY = torch.ops.muster.chunks_matmul.default
_REDUCE = torch.ops.muster.matmul_all_reduce.default
_SCATTER = torch.ops.muster.matmul_reduce_scatter.default
WAITS = (torch.ops._c10d_functional.wait_tensor.default, _MULTIPLY)
# Inductor computes their elements where it needs them, as it does for operators with Tag.pointwise.
_POINTWISE = torch.ops.aten.full, torch.ops.aten.select_scatter, torch.ops.aten.slice_scatter


def tasks_of(graph: Graph, costs: Costs) -> list[Task]:
    """One for each node. A node that becomes a part of another node's kernel takes no time."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    tasks: list[Task] = []
    for node in graph.nodes:
        # The end of the graph does not hold the memory of results: they belong to the caller.
        needs = frozenset(places[each] for each in node.all_input_nodes if node.op != "output")
        if _is_start(node):
            start = message(node, bytes_of(node.args[0]), bytes_of(node), costs)
            tasks.append(by_chunks(replace(start, needs=needs), node, costs))
        elif starts := _starts_of(node, places, tasks):
            tasks.append(by_chunks(Task(Kind.WAIT, 0.0, needs | {starts[0]}, starts[0]), node, costs))
        else:
            tasks.append(Task(Kind.COMPUTE, compute_seconds(node, costs), needs))
    return tasks


def _starts_of(node: Node, places: dict[Node, int], tasks: list[Task]) -> list[int]:
    """The collectives that a wait is for. Of one with several results, the wait needs an item."""
    if node.target not in WAITS:
        return []
    results = node.all_input_nodes
    items = [each for each in results if each.target is operator.getitem]
    before = [*results, *(start for item in items for start in item.all_input_nodes)]
    return [places[each] for each in before if tasks[places[each]].kind is Kind.START]


def message(start: Node, sent: int, received: int, costs: Costs) -> Task:
    """The task of a collective such as `start`, with so many bytes. Inductor reduces in place."""
    seconds = costs.wire_seconds(str(start.args[-1]), str(start.target), sent, received)
    return Task(
        Kind.START, seconds, bytes=0 if "all_reduce" in str(start.target) else received, computing=KERNEL_SECONDS
    )


def by_chunks(task: Task, node: Node, costs: Costs) -> Task:
    """The task of an operator that works by chunks (chunks.py). Other tasks are returned as they are."""
    arguments: Any = node.args
    if node.target is _GATHER:
        return replace(task, seconds=_wire_seconds(node, costs, bytes_of(arguments[0])))
    if node.target is _MULTIPLY:
        gathered, _, count, weights, biases, _ = arguments
        whole = sum(_matmul_seconds(gathered, each, costs) for each in weights)
        computing = costs.chunks_compute_seconds(count, whole, bytes_of([weights, biases]), bytes_of(node))
        return replace(task, computing=computing, chunks=count)
    if node.target not in (_REDUCE, _SCATTER):
        return task
    rows, weights, bias, _, *ranks, count, _ = arguments
    seconds = _matmul_seconds(rows, weights, costs)
    copied, sent = (bytes_of(rows), bytes_of(node) * ranks[0]) if ranks else (0, bytes_of(node))
    computing = costs.chunks_compute_seconds(count, seconds, bytes_of([weights, bias]), copied)
    return replace(task, seconds=_wire_seconds(node, costs, sent), computing=computing, chunks=count)


def _wire_seconds(start: Any, costs: Costs, sent: int) -> float:
    """Of a collective by chunks. Its last arguments are their number and the group."""
    count, group_name = start.args[-2:]
    return costs.chunks_wire_seconds(count, group_name, str(start.target), sent, bytes_of(start))


def _matmul_seconds(rows: Any, weights: Any, costs: Costs) -> float:
    length, width = weights.meta["val"].shape
    height = int(rows.meta["val"].shape[0])
    return costs.compute_seconds(2.0 * height * length * width, bytes_of([rows, weights]))


def _is_start(node: Node) -> bool:
    return (
        node.op == "call_function"
        and node.target is not _MULTIPLY
        and str(node.target).partition(".")[0] in NAMESPACES
        and "wait" not in str(node.target)
        and bool(node.args)
        and isinstance(node.args[-1], str)
    )


def compute_seconds(node: Node, costs: Costs) -> float:
    packet = getattr(node.target, "overloadpacket", None)
    if node.op != "call_function" or packet is None or node.target.is_view:  # type: ignore[union-attr]
        return 0.0
    if packet is torch.ops.aten.cat:
        return costs.copy_seconds(bytes_of(node))
    flops = flops_of(node)
    if flops is not None:
        return costs.compute_seconds(flops, bytes_of(node.all_input_nodes))
    if _is_fused(node):
        return 0.0
    return max(bytes_of(each) for each in (node, *node.all_input_nodes)) / costs.bytes_per_second


def _is_fused(node: Node) -> bool:
    """True if the kernels of its users compute the elements of its result."""
    if not _is_pointwise(node):
        return False
    users = list(node.users)
    for user in users:  # grows
        if getattr(user.target, "is_view", False):
            users.extend(user.users)
        elif not _is_pointwise(user) and torch.Tag.reduction not in getattr(user.target, "tags", ()):
            return False
    return True


def _is_pointwise(node: Node) -> bool:
    return (
        torch.Tag.pointwise in getattr(node.target, "tags", ())
        or getattr(node.target, "overloadpacket", None) in _POINTWISE
    )


def flops_of(node: Node) -> float | None:
    """Floating-point operations of a product, a convolution or an attention. None for others, and if it is unknown."""
    packet = getattr(node.target, "overloadpacket", None)
    if node.op != "call_function" or packet not in flop_registry:
        return None
    if any("val" not in each.meta for each in (node, *node.all_input_nodes)):
        return None  # a node of a later pass of Inductor's
    values = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    return number(flop_registry[packet](*values[0], **values[1], out_val=node.meta["val"]))


def bytes_of(value: Any) -> int:
    """Of a tensor, or of all tensors of a list."""
    value = map_arg(value, lambda each: each.meta.get("val")) if isinstance(value, (Node, list, tuple)) else value
    return sum(int(number(each.numel())) * each.itemsize for each in tensors_of(value))


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


def number(value: Any) -> float:
    """A symbolic size counts as the size that it has in the example, or as nothing if only the run will tell."""
    if isinstance(value, (int, float)):
        return float(value)
    return float(value.node.hint) if value.node.has_hint() else 0.0


def planned_seconds(tasks: list[Task], max_bytes: float) -> float:
    """Of a step in its planned order. max_bytes: as for order()."""
    return timeline(tasks, order(tasks, max_bytes)).total
