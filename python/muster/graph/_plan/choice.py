"""Which small collectives to merge: the choice whose planned step is the shortest.

Merging saves latency, but the first tensor of a bucket then waits for the last one. So a few sizes of buckets are tried
on the graph's tasks, and each is planned with the order that it would have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from muster.graph._plan import NAMESPACES
from muster.graph._plan.buckets import find_buckets, merge
from muster.graph._plan.costs import Costs
from muster.graph._plan.schedule import Kind, Task, order, timeline

_SHARES = 1.0, 0.25, 0.0625, 0.0  # of the largest bucket that is worth it


def merge_best(graph: Graph, costs: Costs, max_bytes: float | None) -> None:
    """Merges collectives of the graph in place. Equal graphs and costs give equal results.

    max_bytes: as for order(). None: the graph keeps the order of Inductor, so merging all that is worth it is best, and
    does not depend on the sizes of other tensors.
    """
    largest, *smaller = _SHARES
    best = _buckets(graph, costs, largest)
    if best and max_bytes is not None:
        choices = [best, *(_buckets(graph, costs, share) for share in smaller)]
        tasks = tasks_of(graph, costs)
        best = min(choices, key=lambda buckets: _seconds(with_buckets(tasks, graph, costs, buckets), max_bytes))
    merge(graph, best)


def _buckets(graph: Graph, costs: Costs, share: float) -> list[list[Node]]:
    return find_buckets(graph, lambda group_name: share * costs.bucket_bytes(group_name))


def _seconds(tasks: list[Task], max_bytes: float) -> float:
    """Of the planned step."""
    return timeline(tasks, order(tasks, max_bytes)).total


def with_buckets(tasks: list[Task], graph: Graph, costs: Costs, buckets: list[list[Node]]) -> list[Task]:
    """The tasks that the graph has after merge(). The starts and waits that are merged stay, and take no time."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    result = list(tasks)
    for members in buckets:
        starts = [places[member] for member in members]
        joined = len(result)
        for member, start in zip(members, starts, strict=True):
            result[start] = Task(Kind.COMPUTE, 0.0, tasks[start].needs)
            result[places[next(iter(member.users))]] = Task(Kind.COMPUTE, 0.0, frozenset([joined + 2]))
        sent, received = _bytes([member.args[0] for member in members]), _bytes(members)
        seconds = costs.wire_seconds(str(members[0].args[-1]), str(members[0].target), sent, received)
        result += [
            Task(Kind.COMPUTE, sent / costs.bytes_per_second, frozenset(starts)),
            Task(Kind.START, seconds, frozenset([joined]), bytes=received),
            Task(Kind.WAIT, 0.0, frozenset([joined + 1]), joined + 1),
        ]
    return result


def tasks_of(graph: Graph, costs: Costs) -> list[Task]:
    """One for each node. Inductor will merge kernels, so only their large operations count: products and copies."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    tasks: list[Task] = []
    for node in graph.nodes:
        needs = frozenset(places[each] for each in node.all_input_nodes)
        if _is_start(node):
            seconds = costs.wire_seconds(str(node.args[-1]), str(node.target), _bytes(node.args[0]), _bytes(node))
            tasks.append(Task(Kind.START, seconds, needs, bytes=_bytes(node)))
        elif starts := [need for need in needs if tasks[need].kind is Kind.START]:
            tasks.append(Task(Kind.WAIT, 0.0, needs, starts[0]))
        else:
            tasks.append(Task(Kind.COMPUTE, _compute_seconds(node, costs), needs))
    return tasks


def _is_start(node: Node) -> bool:
    return (
        node.op == "call_function"
        and str(node.target).partition(".")[0] in NAMESPACES
        and "wait" not in str(node.target)
        and bool(node.args)
        and isinstance(node.args[-1], str)
    )


def _compute_seconds(node: Node, costs: Costs) -> float:
    packet = getattr(node.target, "overloadpacket", None)
    if node.op != "call_function" or packet is None or node.target.is_view:  # type: ignore[union-attr]
        return 0.0
    if packet not in flop_registry:
        return _bytes(node) / costs.bytes_per_second
    values = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    flops = flop_registry[packet](*values[0], **values[1], out_val=node.meta["val"])
    return costs.compute_seconds(_number(flops), 0.0)


def _bytes(value: Any) -> int:
    """Of a tensor, or of all tensors of a list."""
    value = map_arg(value, lambda each: each.meta.get("val")) if isinstance(value, (Node, list, tuple)) else value
    tensors = [each for each in torch.utils._pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
    return sum(int(_number(each.numel())) * each.itemsize for each in tensors)


def _number(value: Any) -> float:
    """A symbolic size counts as the size that it has in the example, or as nothing if only the run will tell."""
    if isinstance(value, (int, float)):
        return float(value)
    return float(value.node.hint) if value.node.has_hint() else 0.0
