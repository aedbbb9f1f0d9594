"""Which small collectives to merge: the choice whose planned step is the shortest.

Merging saves latency, but the first tensor of a bucket then waits for the last one. So a few sizes of buckets are tried
on the graph's tasks, and each is planned with the order that it would have.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph, Node

from muster.graph._plan.costs import Costs
from muster.graph._plan.graph_tasks import bytes_of, message, planned_seconds, tasks_of
from muster.graph._plan.schedule import Kind, Task
from muster.graph._rewrite.buckets import find_buckets, merge

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
        best = min(choices, key=lambda buckets: planned_seconds(with_buckets(tasks, graph, costs, buckets), max_bytes))
    merge(graph, best)


def _buckets(graph: Graph, costs: Costs, share: float) -> list[list[Node]]:
    return find_buckets(graph, lambda group_name: share * costs.bucket_bytes(group_name))


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
        sent, received = bytes_of([member.args[0] for member in members]), bytes_of(members)
        result += [
            Task(Kind.COMPUTE, costs.copy_seconds(sent), frozenset(starts)),
            replace(message(members[0], sent, received, costs), needs=frozenset([joined])),
            Task(Kind.WAIT, 0.0, frozenset([joined + 1]), joined + 1),
        ]
    return result
