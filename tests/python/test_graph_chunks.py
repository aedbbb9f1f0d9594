"""Products and collectives that are cut into chunks: the choice follows from the costs, and the results stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from compiled_gradients import compare_with_eager
from muster.graph._plan.costs import Costs, LinkCosts
from muster.graph._plan.graph_tasks import tasks_of
from muster.graph._plan.schedule import Kind, order, timeline
from muster.graph._rewrite.chunk_choice import cut_best, with_cuts
from muster.graph._rewrite.chunks import cut, find_chains
from ranks import run_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as funcol
from torch.fx.experimental.proxy_tensor import make_fx

RANKS, ROWS, WIDTH = 2, 768, 256
TIMEOUT = 400  # seconds: Inductor calls a C++ compiler, and the machine may be loaded
c10d = torch.ops._c10d_functional


def gather(x: Tensor, weight: Tensor, other: Tensor) -> list[Tensor]:
    rows = c10d.wait_tensor(c10d.all_gather_into_tensor(x, RANKS, "0"))
    return [rows @ weight, torch.addmm(weight[0], rows, other)]


def gather_and_keep(x: Tensor, weight: Tensor, other: Tensor) -> list[Tensor]:
    rows = c10d.wait_tensor(c10d.all_gather_into_tensor(x, RANKS, "0"))
    return [rows @ weight, rows.t() @ (rows @ other)]


def reduce(x: Tensor, weight: Tensor, other: Tensor) -> list[Tensor]:
    return [c10d.wait_tensor(c10d.all_reduce((x @ weight).view(-1), "sum", "0")) + other[0, 0]]


def scatter(x: Tensor, weight: Tensor, other: Tensor) -> list[Tensor]:
    return [c10d.wait_tensor(c10d.reduce_scatter_tensor(x @ weight, "sum", RANKS, "0")) @ other]


def reduce_in_another_shape(x: Tensor, weight: Tensor, other: Tensor) -> list[Tensor]:
    product = x @ weight
    return [c10d.wait_tensor(c10d.all_reduce(product.view(-1, product.shape[0]), "sum", "0")) + other[0, 0]]


FUNCTIONS = [gather, gather_and_keep, reduce, reduce_in_another_shape, scatter]


def graph_of(function: Callable[..., Any]) -> torch.fx.Graph:
    with FakeTensorMode():
        return make_fx(function)(torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)).graph


def costs(latency: float, bytes_per_second: float, overlap: float = 1.0) -> Costs:
    return Costs(1e9, 1e12, {"0": LinkCosts(latency, bytes_per_second, RANKS, overlap)})


STARTS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_chunks")


def messages(graph: torch.fx.Graph) -> int:
    """A collective by chunks has their number before the group's name."""
    starts = [node for node in graph.nodes if "c10d_functional" in str(node.target) and "wait" not in str(node.target)]
    chunked = [node for node in graph.nodes if str(node.target).split(".")[-2:][0] in STARTS]
    return len(starts) + sum(node.args[-2] for node in chunked)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_chain_is_cut_where_its_message_takes_as_long_as_its_product(function: Callable[..., Any]) -> None:
    graph = graph_of(function)
    cut_best(graph, costs(1e-6, ROWS * WIDTH * 4 / 0.1), 1e9)
    assert messages(graph) in (2, 4)


@pytest.mark.parametrize(
    "rates",
    [
        costs(1.0, 1e9),  # each chunk would wait for the latency
        costs(1e-6, 1e12),  # there is nothing to hide
        costs(1e-6, ROWS * WIDTH * 4 / 0.1, overlap=0.0),  # sending takes the time of computing
    ],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_chain_stays_whole_where_cutting_does_not_pay(function: Callable[..., Any], rates: Costs) -> None:
    graph = graph_of(function)
    before = [str(node.target) for node in graph.nodes]
    cut_best(graph, rates, 1e9)
    assert [str(node.target) for node in graph.nodes] == before


def test_a_message_that_other_computing_hides_stays_whole() -> None:
    def beside(x: Tensor, weight: Tensor, other: Tensor) -> list[Tensor]:
        for _ in range(8):
            other = torch.relu(other @ other)
        return [*reduce(x, weight, weight), other]

    graph = graph_of(beside)
    cut_best(graph, costs(1e-6, ROWS * WIDTH * 4 / 0.1), 1e9)
    assert messages(graph) == 1


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("count", [2, 3])
def test_tasks_with_cuts_are_those_of_the_graph_that_is_cut(function: Callable[..., Any], count: int) -> None:
    graph = graph_of(function)
    rates = costs(1e-4, 1e7)
    (chain,) = find_chains(graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    expected = with_cuts(tasks_of(graph, rates), places, rates, {chain: count})
    cut(graph, {chain: count})
    tasks = tasks_of(graph, rates)
    for kind in Kind:
        seconds = [sum(task.seconds for task in each if task.kind is kind) for each in (tasks, expected)]
        assert seconds[0] == pytest.approx(seconds[1], rel=0.05)
    assert timeline(tasks, order(tasks)).total == pytest.approx(timeline(expected, order(expected)).total, rel=0.05)


def world() -> Any:
    return dist.group.WORLD


def column_parallel(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    """A block whose activations are sharded by rows: gather, two products, a product, scatter."""
    rows = funcol.all_gather_tensor(x.flatten(0, 1), 0, world())
    hidden = torch.nn.functional.silu(rows @ gate) * (rows @ up)
    return funcol.reduce_scatter_tensor(hidden @ down, "sum", 0, world()).view(x.shape)


def lists_parallel(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    """The same, with lists of tensors and calls that have gradients."""
    calls: Any = torch.distributed.nn.functional
    rows = torch.cat(calls.all_gather(x.flatten(0, 1)))
    hidden = torch.nn.functional.silu(rows @ gate) * (rows @ up)
    parts = list((hidden @ down).split(ROWS * len(x)))
    result: Tensor = calls.reduce_scatter(torch.empty_like(parts[0]), parts)
    return result.view(x.shape)


def row_parallel(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    """A block whose activations every rank has: two products, a product, all_reduce."""
    hidden = torch.nn.functional.silu(x @ gate) * (x @ up)
    return funcol.all_reduce(hidden @ down, "sum", world())


def compare_blocks(rank: int) -> list[tuple[int, int]]:
    """Compiles with costs at which cutting pays, and returns how many collectives by chunks the forward and the
    backward have.
    """
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    name = world().group_name
    rates = Costs(1e9, 1e12, {name: LinkCosts(1e-6, 1e7, ranks)})
    found = []
    for block in (column_parallel, lists_parallel, row_parallel):
        torch.manual_seed(0)
        weights = [torch.randn(WIDTH, WIDTH) / WIDTH, torch.randn(WIDTH, WIDTH) / WIDTH, torch.randn(WIDTH, WIDTH)]
        x = torch.randn(2, ROWS, WIDTH)
        torch._dynamo.reset()
        codes = compare_with_eager(block, (x, *weights), rates, lambda value: value.square().mean())
        found.append(tuple(sum(code.count(f"muster.{each}.default(") for each in STARTS) for code in codes))
    return found  # type: ignore[return-value]


def test_a_product_whose_weights_need_another_one_stays_outside() -> None:
    def chained(x: Tensor, weight: Tensor, other: Tensor) -> list[Tensor]:
        rows = c10d.wait_tensor(c10d.all_gather_into_tensor(x, RANKS, "0"))
        first = rows @ weight.t()  # the transposed weights come after the gather, too
        return [first, rows @ other, rows @ first[:WIDTH]]

    graph = graph_of(chained)
    (chain,) = find_chains(graph)
    assert len(chain.products) == 2
    assert chain.whole
    cut(graph, {chain: 2})  # checks the order of the nodes


def test_blocks_that_are_cut_have_the_same_results_and_gradients(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    for column, lists, row in run_ranks(3, compare_blocks, env=env, timeout=TIMEOUT):
        # The gradient of the last block's result has no product.
        assert (*column, *lists, row[0]) == (2, 1, 2, 1, 1), (column, lists, row)
