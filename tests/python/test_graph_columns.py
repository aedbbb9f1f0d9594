"""Products that are split into their columns: the choice follows from the costs, and the results stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
from compiled_gradients import compare_with_eager
from muster.graph._plan.costs import Costs, LinkCosts
from muster.graph._plan.graph_tasks import tasks_of
from muster.graph._plan.schedule import order, timeline
from muster.graph._rewrite.columns import find_columns, split, split_best, with_splits
from ranks import run_ranks
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

RANKS, ROWS, WIDTH = 2, 256, 128
TIMEOUT = 400  # seconds: Inductor calls a C++ compiler, and the machine may be loaded
c10d = torch.ops._c10d_functional
PRODUCTS = torch.ops.aten.mm.default, torch.ops.aten.addmm.default


def gathered(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), RANKS, "0"))  # type: ignore[no-any-return]


def attention(x: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    queries, keys, values = (x @ weights).view(-1, 8, 3 * WIDTH).chunk(3, -1)
    return queries.reshape(-1, WIDTH) @ gathered(keys.reshape(-1, WIDTH)).t() @ gathered(values.reshape(-1, WIDTH))


def uneven(x: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """Fewer heads for keys and values than for queries."""
    queries, keys, values = torch.addmm(bias, x, weights).split([2 * WIDTH, WIDTH // 2, WIDTH // 2], 1)
    return queries.sum() + gathered(keys).sum() + gathered(values).sum()


FUNCTIONS = [attention, uneven]


def traced(function: Callable[..., Any]) -> tuple[GraphModule, list[Tensor]]:
    inputs = [torch.randn(ROWS, WIDTH), torch.randn(WIDTH, 3 * WIDTH), torch.randn(3 * WIDTH)]
    return make_fx(function, tracing_mode="fake")(*inputs), inputs


def costs(bytes_per_second: float, latency: float = 1e-6) -> Costs:
    return Costs(1e9, 1e12, {"0": LinkCosts(latency, bytes_per_second, RANKS)})


def products(module: GraphModule) -> list[tuple[int, ...]]:
    return [tuple(node.meta["val"].shape) for node in module.graph.nodes if node.target in PRODUCTS]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_product_is_split_where_messages_take_as_long(function: Callable[..., Any]) -> None:
    module, _ = traced(function)
    before = len(products(module))
    split_best(module.graph, costs(ROWS * WIDTH * 4 / 0.1), 1e9)
    assert len(products(module)) == before + 2


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_product_stays_whole_where_messages_take_no_time(function: Callable[..., Any]) -> None:
    module, _ = traced(function)
    before = [str(node.target) for node in module.graph.nodes]
    split_best(module.graph, costs(1e12), 1e9)
    assert [str(node.target) for node in module.graph.nodes] == before


def narrow(x: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """Reading the rows takes most of the time, and each part reads all of them."""
    parts = (x @ weights[:, :16]).split(1, 1)
    return gathered(parts[0]).sum() + torch.cat(parts[1:], 1).sum()


def test_a_narrow_product_stays_whole() -> None:
    module, _ = traced(narrow)
    slow_memory = Costs(1e12, 1e6, {"0": LinkCosts(1e-6, 1e5, RANKS)})
    split_best(module.graph, slow_memory, 1e9)
    assert len(products(module)) == 1


@pytest.mark.parametrize("bytes_per_second", [1e12, 1e6])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_tasks_with_splits_are_those_of_the_graph_that_is_split(
    function: Callable[..., Any], bytes_per_second: float
) -> None:
    graph = traced(function)[0].graph
    rates = Costs(1e9, bytes_per_second, {"0": LinkCosts(1e-4, 1e7, RANKS)})
    (columns,) = find_columns(graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    expected = with_splits(tasks_of(graph, rates), places, rates, [columns])
    split(graph, columns)
    tasks = tasks_of(graph, rates)
    assert timeline(tasks, order(tasks)).total == pytest.approx(timeline(expected, order(expected)).total, rel=0.01)


def test_a_product_stays_whole_without_collectives() -> None:
    def local(x: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
        first, second = (x @ weights).chunk(2, -1)
        return first * second

    module, _ = traced(local)
    assert len(list(find_columns(module.graph))) == 1
    split_best(module.graph, costs(1e3), 1e9)
    assert len(products(module)) == 1


def halves(x: Tensor, weights: Tensor, bias: Tensor) -> list[Tensor]:
    first, second = (x @ weights).view(-1, 8, 3 * WIDTH).chunk(2, -1)
    return [first * 2, second * 3]


def thirds_with_bias(x: Tensor, weights: Tensor, bias: Tensor) -> list[Tensor]:
    return [part * 2 for part in torch.addmm(bias, x, weights).split([5, 3 * WIDTH - 12, 7], 1)]


def some(x: Tensor, weights: Tensor, bias: Tensor) -> list[Tensor]:
    first, _, third = torch.addmm(bias, x, weights).chunk(3, 1)
    return [third * 2, first * 3, first.t() * 4]


def with_one_bias(x: Tensor, weights: Tensor, bias: Tensor) -> list[Tensor]:
    return [part * 2 for part in torch.addmm(bias[:1], x, weights).chunk(2, 1)]


@pytest.mark.parametrize("function", [halves, thirds_with_bias, some, with_one_bias])
def test_the_parts_of_a_product_keep_their_values(function: Callable[..., Any]) -> None:
    module, inputs = traced(function)
    (columns,) = find_columns(module.graph)
    split(module.graph, columns)
    module.graph.lint()
    module.recompile()
    assert len(products(module)) == len(columns.parts)
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-4, atol=1e-4)


def rows(x: Tensor, weights: Tensor, bias: Tensor) -> list[Tensor]:
    return [part * 2 for part in (x @ weights).chunk(2)]


def in_another_shape(x: Tensor, weights: Tensor, bias: Tensor) -> list[Tensor]:
    return [part * 2 for part in (x @ weights).view(-1, WIDTH).chunk(2, -1)]


def used_as_a_whole(x: Tensor, weights: Tensor, bias: Tensor) -> list[Tensor]:
    product = x @ weights
    return [product.sum(), *(part * 2 for part in product.chunk(2, -1))]


def strided(x: Tensor, weights: Tensor, bias: Tensor) -> list[Tensor]:
    first, second = (x @ weights).chunk(2, 1)
    return [first * 2, second.as_strided((2, 2), (6, 1)) * 2]


def without_columns(x: Tensor, weights: Tensor, bias: Tensor) -> list[Tensor]:
    return [part * 2 for part in (x @ weights[:, :0]).chunk(2, 1)]


@pytest.mark.parametrize("function", [rows, in_another_shape, used_as_a_whole, strided, without_columns])
def test_other_products_have_no_columns(function: Callable[..., Any]) -> None:
    assert not list(find_columns(traced(function)[0].graph))


def context_parallel(x: Tensor, weights: Tensor) -> Tensor:
    """Each rank has a part of the tokens (tokens, samples, features), and gathers the keys and values of all."""
    calls: Any = torch.distributed.nn.functional
    queries, *others = (x @ weights).chunk(3, -1)
    keys, values = (torch.cat(calls.all_gather(each.contiguous())) for each in others)
    queries, keys, values = (
        each.view(len(each), -1, 4, WIDTH // 4).permute(1, 2, 0, 3) for each in (queries, keys, values)
    )
    return F.scaled_dot_product_attention(queries, keys, values)


def compare_attention(rank: int) -> list[int]:
    """Compiles with costs at which splitting pays. Returns the products of the forward and of the backward."""
    torch.manual_seed(0)
    weights = torch.randn(WIDTH, 3 * WIDTH) / WIDTH
    torch.manual_seed(rank)
    x = torch.randn(64, 4, WIDTH)
    world: Any = dist.group.WORLD
    rates = Costs(1e9, 1e12, {world.group_name: LinkCosts(1e-6, 1e7, dist.get_world_size())})
    codes = compare_with_eager(
        context_parallel, (x, weights), rates, lambda value: value.square().sum(), rtol=1e-4, atol=1e-4
    )
    return [code.count("extern_kernels.mm(") for code in codes]


def test_attention_that_is_split_has_the_same_results_and_gradients(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    for forward, backward in run_ranks(3, compare_attention, env=env, timeout=TIMEOUT):
        assert (forward, backward) == (3, 2)
