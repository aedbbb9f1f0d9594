"""Which chains of products and collectives to cut into chunks: the choice whose planned step is the shortest.

Each chunk costs the latency of a collective, and the results are copied together. Where other computing hides the
message already, cutting is of no use. So the chains of each shape are tried on the graph's tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from muster.graph._plan.chunks import Chain, cut, find_chains, rows_of
from muster.graph._plan.costs import KERNEL_SECONDS, Costs
from muster.graph._plan.graph_tasks import bytes_of, compute_seconds, message, planned_seconds, tasks_of
from muster.graph._plan.schedule import Kind, Task

_COUNTS = 1, 2, 4  # of chunks: more hide little more, and take long to compile
# Of a chunk. Smaller operations may begin only when they are awaited (src/muster/group/queue/start_policy.h).
_LEAST_BYTES = 128 << 10
_LEAST_GAIN = 0.01  # of a step


def cut_best(graph: Graph, costs: Costs, max_bytes: float) -> None:
    """Cuts chains of the graph in place. Equal graphs and costs give equal results. max_bytes: as for order()."""
    kinds: dict[Any, dict[Chain, int]] = {}
    for chain in find_chains(graph):
        count = min(_COUNTS, key=lambda count: _seconds_alone(chain, count, costs))
        if count > 1:
            shapes = [each.meta["val"].shape for each in chain.products]
            kinds.setdefault((chain.start.target, *chain.start.args[1:], *shapes), {})[chain] = count
    if not kinds:
        return
    tasks = tasks_of(graph, costs)
    places = {node: place for place, node in enumerate(graph.nodes)}
    chosen: dict[Chain, int] = {}
    shortest = planned_seconds(tasks, max_bytes)
    for kind in kinds.values():
        seconds = planned_seconds(with_cuts(tasks, places, costs, chosen | kind), max_bytes)
        if seconds < (1 - _LEAST_GAIN) * shortest:
            chosen, shortest = chosen | kind, seconds
    cut(graph, chosen)


def with_cuts(tasks: list[Task], places: dict[Node, int], costs: Costs, chunks: dict[Chain, int]) -> list[Task]:
    """The tasks that the graph has after cut(). What is cut stays, and takes the time of copying results together."""
    result = list(tasks)
    for chain, count in chunks.items():
        (_cut_gather if chain.gathers else _cut_reduction)(result, places, costs, chain, count)
    return result


def _cut_gather(tasks: list[Task], places: dict[Node, int], costs: Costs, chain: Chain, count: int) -> None:
    start = places[chain.start]
    arrived = [_add_message(tasks, start, _message(chain, count, costs)) for _ in range(count)]
    for product in chain.products:
        others = {places[each] for each in product.all_input_nodes if each is not rows_of(product)}
        seconds = _chunk_seconds(product, count, costs)
        parts = [_add(tasks, seconds, {wait, *others}) for wait in arrived]
        tasks[places[product]] = Task(Kind.COMPUTE, _copy_seconds(product, costs), frozenset(parts))
    tasks[start] = Task(Kind.COMPUTE, 0.0, tasks[start].needs)
    copying = _copy_seconds(chain.wait, costs) if chain.wait in chain.copied else 0.0
    tasks[places[chain.wait]] = Task(Kind.COMPUTE, copying, frozenset(arrived))


def _cut_reduction(tasks: list[Task], places: dict[Node, int], costs: Costs, chain: Chain, count: int) -> None:
    (product,) = chain.products
    start, needs = places[chain.start], tasks[places[product]].needs
    tasks[places[product]] = Task(Kind.COMPUTE, 0.0, needs)
    tasks[start] = Task(Kind.COMPUTE, 0.0, tasks[start].needs)
    chunk, seconds = _message(chain, count, costs), _chunk_seconds(product, count, costs)
    arrived = [_add_message(tasks, _add(tasks, seconds, needs), chunk) for _ in range(count)]
    tasks[places[chain.wait]] = Task(Kind.COMPUTE, _copy_seconds(chain.wait, costs), frozenset(arrived))


def _add(tasks: list[Task], seconds: float, needs: Iterable[int]) -> int:
    tasks.append(Task(Kind.COMPUTE, seconds, frozenset(needs)))
    return len(tasks) - 1


def _add_message(tasks: list[Task], needs: int, chunk: Task) -> int:
    """Returns the index of the wait."""
    tasks.append(replace(chunk, needs=frozenset([needs])))
    start = len(tasks) - 1
    tasks.append(Task(Kind.WAIT, 0.0, frozenset([start]), start))
    return len(tasks) - 1


def _seconds_alone(chain: Chain, count: int, costs: Costs) -> float:
    """Of a chain in so many chunks, if the rank computes nothing else."""
    largest = max(bytes_of(chain.start.args[0]), bytes_of(chain.start)) // count
    if count > 1 and (count > chain.rows or largest < _LEAST_BYTES):
        return float("inf")
    wire = _message(chain, count, costs).seconds
    computing = sum(_chunk_seconds(product, count, costs) for product in chain.products)
    hidden = (count - 1) * min(wire, computing) * costs.links[str(chain.start.args[-1])].overlap
    copying = sum(_copy_seconds(each, costs) for each in chain.copied) if count > 1 else 0.0
    return count * (wire + computing) - hidden + copying


def _message(chain: Chain, count: int, costs: Costs) -> Task:
    """The collective of one of so many chunks."""
    return message(chain.start, bytes_of(chain.start.args[0]) // count, bytes_of(chain.start) // count, costs)


def _chunk_seconds(product: Node, count: int, costs: Costs) -> float:
    """Each chunk reads all weights."""
    inputs = [each for each in product.all_input_nodes if each is not rows_of(product)]
    weights = bytes_of(inputs) / costs.bytes_per_second
    return KERNEL_SECONDS + weights + (compute_seconds(product, costs) - weights) / count


def _copy_seconds(node: Node, costs: Costs) -> float:
    return costs.copy_seconds(bytes_of(node))
