"""Which chains of products and collectives to cut into chunks: the choice whose planned step is the shortest.

Each chunk costs the latency of a collective, and some results are copied. Where other computing hides the message
already, cutting is of no use. So the chains of each shape are tried on the graph's tasks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from muster.graph._plan.costs import Costs
from muster.graph._plan.graph_tasks import bytes_of, compute_seconds, planned_seconds, tasks_of
from muster.graph._plan.schedule import Kind, Task
from muster.graph._rewrite.chunks import Chain, cut, find_chains, others_of
from muster.graph._rewrite.greedy import choose

_COUNTS = 1, 2, 4  # of chunks: more hide little more
# Of a chunk. Smaller operations may begin only when they are awaited (src/muster/group/queue/start_policy.h).
_LEAST_BYTES = 128 << 10


def cut_best(graph: Graph, costs: Costs, max_bytes: float) -> None:
    """Cuts chains of the graph in place. Equal graphs and costs give equal results. max_bytes: as for order()."""
    kinds: dict[Any, list[Chain]] = {}
    for chain in find_chains(graph):
        shapes = [each.meta["val"].shape for each in chain.products]
        kinds.setdefault((chain.start.target, *chain.start.args[1:], chain.whole, *shapes), []).append(chain)
    choices = []
    for chains in kinds.values():
        count = _best_count(chains[0], costs)
        if count > 1:
            choices.append(dict.fromkeys(chains, count))
    if not choices:
        return
    tasks = tasks_of(graph, costs)
    places = {node: place for place, node in enumerate(graph.nodes)}

    def seconds(chosen: list[dict[Chain, int]]) -> float:
        return planned_seconds(with_cuts(tasks, places, costs, _joined(chosen)), max_bytes)

    cut(graph, _joined(choose(choices, seconds)))


def _joined(choices: list[dict[Chain, int]]) -> dict[Chain, int]:
    return {chain: count for choice in choices for chain, count in choice.items()}


def _best_count(chain: Chain, costs: Costs) -> int:
    """Of chunks, if the rank computes nothing else."""
    return min(_COUNTS, key=lambda count: _seconds_alone(chain, count, costs))


def with_cuts(tasks: list[Task], places: dict[Node, int], costs: Costs, chunks: dict[Chain, int]) -> list[Task]:
    """The tasks that the graph has after cut(). The products stay, and take no time."""
    result = list(tasks)
    for chain, count in chunks.items():
        start, wait = places[chain.start], places[chain.wait]
        products = {places[product] for product in chain.products}
        wire, computing = _message_seconds(chain, count, costs), _computing(chain, count, costs)
        if chain.gathers:
            others = {places[other] for product in chain.products for other in others_of(product)}
            result[start] = replace(result[start], seconds=wire)
            result[wait] = replace(result[wait], needs=result[wait].needs | others, computing=computing, chunks=count)
            for product in products:
                result[product] = Task(Kind.COMPUTE, 0.0, frozenset([wait]))
        else:
            (product,) = products
            result[product] = Task(Kind.COMPUTE, 0.0, result[product].needs)
            result[start] = replace(result[start], seconds=wire, computing=computing, chunks=count)
    return result


def _seconds_alone(chain: Chain, count: int, costs: Costs) -> float:
    """Of a chain in so many chunks, if the rank computes nothing else."""
    largest = max(bytes_of(chain.start.args[0]), bytes_of(chain.start)) // count
    if count > 1 and (count > chain.rows or largest < _LEAST_BYTES):
        return float("inf")
    wire, computing = _message_seconds(chain, count, costs), _computing(chain, count, costs)
    overlap = costs.links[str(chain.start.args[-1])].overlap
    return wire + computing - (1 - 1 / count) * min(wire, computing) * overlap


def _message_seconds(chain: Chain, count: int, costs: Costs) -> float:
    start = chain.start
    sizes = bytes_of(start.args[0]), bytes_of(start)
    return costs.chunks_wire_seconds(count, str(start.args[-1]), str(start.target), *sizes)


def _computing(chain: Chain, count: int, costs: Costs) -> float:
    whole = sum(compute_seconds(product, costs) for product in chain.products)
    weights = sum(bytes_of(others_of(product)) for product in chain.products)
    return costs.chunks_compute_seconds(count, whole, weights, bytes_of(chain.copied))
