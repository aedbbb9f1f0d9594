"""Which collectives of a graph are merged: the choice follows from the costs. Nothing is compiled or sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from muster.graph._plan.costs import Costs, LinkCosts
from muster.graph._plan.graph_tasks import tasks_of
from muster.graph._plan.schedule import Kind, order, timeline
from muster.graph._rewrite.bucket_choice import merge_best, with_buckets
from muster.graph._rewrite.buckets import find_buckets, merge
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

c10d = torch.ops._c10d_functional
SIDE, LAYERS, RANKS = 256, 6, 2
SHARD_BYTES = SIDE // RANKS * SIDE * 4


def graph_of(function: Any, *shapes: tuple[int, ...]) -> torch.fx.Graph:
    with FakeTensorMode():
        return make_fx(function)(*[torch.ones(shape) for shape in shapes]).graph


def gathered(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
    for shard in shards:
        x = x @ c10d.wait_tensor(c10d.all_gather_into_tensor(shard, RANKS, "0"))
    return x


def reduced(*xs: torch.Tensor) -> list[torch.Tensor]:
    return [c10d.wait_tensor(c10d.all_reduce(x, "sum", "0")) * 2 for x in xs]


def scattered(*xs: torch.Tensor) -> list[torch.Tensor]:
    return [c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", RANKS, "0")) * 2 for x in xs]


def collectives(graph: torch.fx.Graph) -> int:
    return sum("_c10d_functional" in str(node.target) and "wait" not in str(node.target) for node in graph.nodes)


def costs(latency: float, bytes_per_second: float) -> Costs:
    return Costs(1e10, 1e10, {"0": LinkCosts(latency, bytes_per_second, RANKS)})


@pytest.fixture
def layers() -> torch.fx.Graph:
    return graph_of(gathered, (SIDE, SIDE), *[(SIDE // RANKS, SIDE)] * LAYERS)


def test_tasks_have_the_time_of_products_and_messages(layers: torch.fx.Graph) -> None:
    tasks = tasks_of(layers, costs(1e-3, 1e8))
    starts = [task for task in tasks if task.kind is Kind.START]
    assert [task.seconds for task in starts] == pytest.approx([1e-3 + SHARD_BYTES / 1e8] * LAYERS)
    assert [task.bytes for task in starts] == [RANKS * SHARD_BYTES] * LAYERS
    assert sum(task.kind is Kind.WAIT for task in tasks) == LAYERS
    products = [task.seconds for task in tasks if task.kind is Kind.COMPUTE and task.seconds > 0]
    matrices_read = 2 * 4 * SIDE**2  # bytes
    assert products == pytest.approx([(2 * SIDE**3 + matrices_read) / 1e10] * LAYERS, rel=0.01)


def test_a_saved_wait_is_an_input_of_the_backward_graph() -> None:
    """Inductor names an input after the node that was saved. The target of an input is its name."""
    graph = graph_of(gathered, (SIDE, SIDE), (SIDE // RANKS, SIDE))
    (saved,) = [node for node in graph.nodes if node.op == "placeholder"][1:]
    saved.target = saved.name = "wait_tensor"
    kinds = [task.kind for task in tasks_of(graph, costs(1e-3, 1e8))]
    assert kinds.count(Kind.WAIT) == 1


def test_messages_that_computing_hides_are_not_merged(layers: torch.fx.Graph) -> None:
    """A gather takes less time than a product, so only the first one is waited for. Merged, all would be."""
    merge_best(layers, costs(1e-4, 1e8), 1e9)
    assert collectives(layers) == LAYERS


def test_messages_whose_latency_is_most_of_the_time_are_merged(layers: torch.fx.Graph) -> None:
    merge_best(layers, costs(1.0, 1e8), 1e9)
    assert collectives(layers) == 1


def test_independent_small_messages_are_merged() -> None:
    graph = graph_of(reduced, *[(16,)] * 8)
    merge_best(graph, costs(1e-4, 1e9), 1e9)
    assert collectives(graph) == 1


def loss_of_words(scores: torch.Tensor, sums: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The backward of a loss. Inductor makes one kernel of all that follows the first wait."""
    target = c10d.wait_tensor(c10d.all_reduce(-gradient, "sum", "0"))
    zeros = torch.full(scores.shape, 0.0)
    of_target = torch.select_scatter(zeros, target, 1, 0)
    of_sums = c10d.wait_tensor(c10d.all_reduce(gradient / sums, "sum", "0"))
    return of_target + of_sums.unsqueeze(1) * scores.exp()


def test_an_operation_of_a_later_kernel_hides_no_message() -> None:
    graph = graph_of(loss_of_words, (SIDE, 4096), (SIDE,), (SIDE,))
    rates = costs(1e-4, 1e9)
    merge_best(graph, rates, 1e9)
    assert collectives(graph) == 1
    (kernel,) = [task for task in tasks_of(graph, rates) if task.kind is Kind.COMPUTE and task.seconds > 1e-5]
    assert kernel.seconds == pytest.approx(SIDE * 4096 * 4 / rates.bytes_per_second)


def test_a_reduction_takes_the_time_of_what_it_reads() -> None:
    def mean_of_squares(x: torch.Tensor) -> torch.Tensor:
        return (x * x).mean(1)

    tasks = tasks_of(graph_of(mean_of_squares, (SIDE, SIDE)), costs(1e-4, 1e9))
    assert sum(task.seconds for task in tasks) == pytest.approx(SIDE * SIDE * 4 / 1e10)


def test_the_order_of_inductor_merges_all_that_is_worth_it(layers: torch.fx.Graph) -> None:
    merge_best(layers, costs(1e-3, 1e8), None)
    assert collectives(layers) == 1


def test_a_choice_that_merges_nothing_leaves_the_graph(layers: torch.fx.Graph) -> None:
    before = [str(node.target) for node in layers.nodes]
    merge_best(layers, costs(1e-4, 1e8), 1e9)
    assert [str(node.target) for node in layers.nodes] == before
    layers.lint()


@pytest.mark.parametrize("function", [reduced, gathered, scattered])
@pytest.mark.parametrize("most_bytes", [3 * SHARD_BYTES, 1_000_000_000])
def test_tasks_with_buckets_are_those_of_the_merged_graph(function: Any, most_bytes: int) -> None:
    shapes = [(SIDE // RANKS, SIDE)] * LAYERS
    graph = graph_of(function, *([(SIDE, SIDE)] if function is gathered else []), *shapes)
    rates = costs(1e-3, 1e8)
    buckets = find_buckets(graph, lambda group_name: most_bytes)
    assert buckets
    expected = with_buckets(tasks_of(graph, rates), graph, rates, buckets)
    merge(graph, buckets)
    tasks = tasks_of(graph, rates)
    for kind in Kind:
        seconds = [sum(task.seconds for task in each if task.kind is kind) for each in (tasks, expected)]
        assert seconds[0] == pytest.approx(seconds[1])
    # Tasks that are equally urgent may come in another order.
    assert timeline(tasks, order(tasks)).total == pytest.approx(timeline(expected, order(expected)).total, rel=0.02)
