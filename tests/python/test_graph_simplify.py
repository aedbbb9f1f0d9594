"""Forms of a graph that the plan does not know: they are gone before it, and the results stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from muster.graph._rewrite.simplify import simplify
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

CAT = torch.ops.aten.cat.default


def halves(x: Tensor) -> Tensor:
    return torch.cat((x * 2).split(2)) + 1


def rows(x: Tensor) -> Tensor:
    return torch.cat((x * 2).view(2, 2, 6).unbind()) + 1


def flat_halves(x: Tensor) -> Tensor:
    return torch.cat([half.reshape(-1) for half in (x * 2).split(2)]) + 1


def slices(x: Tensor) -> Tensor:
    doubled = (x * 2).view(-1)
    return torch.cat([doubled[:12].view(2, 6), doubled[12:].view(2, 6)]) + 1


def uneven(x: Tensor) -> Tensor:
    return torch.cat((x * 2).split([1, 3])) + 1


def twice(x: Tensor) -> Tensor:
    """The parts of what is joined are split and joined again."""
    return torch.cat([part.view(-1) for part in torch.cat((x * 2).split(2)).split(1)]) + 1


def swapped(x: Tensor) -> Tensor:
    first, second = (x * 2).split(2)
    return torch.cat([second, first]) + 1


def columns(x: Tensor) -> Tensor:
    return torch.cat((x * 2).split(3, 1), 1) + 1


def below_each_other(x: Tensor) -> Tensor:
    return torch.cat((x * 2).split(3, 1)) + 1


def transposed(x: Tensor) -> Tensor:
    return torch.cat((x * 2).t().split(3)) + 1


def some(x: Tensor) -> Tensor:
    return torch.cat((x * 2).split(1)[:3]) + 1


def others(x: Tensor) -> Tensor:
    return torch.cat([(x * 2)[:2], (x * 3)[2:]]) + 1


def as_integers(x: Tensor) -> Tensor:
    return torch.cat((x * 2).view(torch.int32).split(2)) + 1


def as_real_numbers(x: Tensor) -> Tensor:
    return torch.cat(torch.view_as_real(torch.complex(x, x)).view(-1)[:24].split(12)) + 1


def strided(x: Tensor) -> Tensor:
    return torch.cat((x * 2).split(2)).as_strided((2, 2), (6, 1)) + 1


def of_an_input(x: Tensor) -> Tensor:
    return torch.cat(x.split(2))


def beside_the_whole(x: Tensor) -> tuple[Tensor, Tensor]:
    doubled = x * 2
    return torch.cat(doubled.split(2)), doubled.view(-1)


def beside_an_input_that_is_written(x: Tensor) -> Tensor:
    doubled = x * 2
    x.copy_(doubled)
    return torch.cat(doubled.split(2))


def traced(function: Callable[..., Any]) -> tuple[GraphModule, Any]:
    x = torch.arange(24.0).view(4, 6)
    return make_fx(function, tracing_mode="fake")(x), x


def cats(graph: torch.fx.Graph) -> int:
    return sum(node.target is CAT for node in graph.nodes)


@pytest.mark.parametrize("function", [halves, rows, flat_halves, slices, uneven, twice])
def test_parts_that_are_joined_again_are_a_view(function: Callable[..., Any]) -> None:
    module, x = traced(function)
    simplify(module.graph)
    module.graph.lint()
    module.recompile()
    assert cats(module.graph) == 0
    assert not any("split" in str(node.target) for node in module.graph.nodes)
    torch.testing.assert_close(module(x), function(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "function", [swapped, columns, below_each_other, transposed, some, others, as_integers, as_real_numbers, strided]
)
def test_other_tensors_are_still_joined(function: Callable[..., Any]) -> None:
    module, x = traced(function)
    simplify(module.graph)
    module.recompile()
    assert cats(module.graph) == 1
    torch.testing.assert_close(module(x), function(x), rtol=0, atol=0)


@pytest.mark.parametrize("function", [of_an_input, beside_the_whole, beside_an_input_that_is_written])
def test_a_result_shares_no_memory_with_an_input_or_another_result(function: Callable[..., Any]) -> None:
    module, _ = traced(function)
    simplify(module.graph)
    assert cats(module.graph) == 1


def test_shapes_that_are_not_known_are_left_alone() -> None:
    module = make_fx(halves, tracing_mode="symbolic")(torch.ones(4, 6))
    simplify(module.graph)
    assert cats(module.graph) == 1


def test_a_place_that_only_the_run_tells_is_left_alone() -> None:
    def rows_of_an_index(x: Tensor, index: Tensor) -> Tensor:
        place: Any = index.item()
        row = (x * 2).narrow(0, place, 1)
        return torch.cat([row, row]) + 1

    shapes = ShapeEnv(allow_scalar_outputs=True)
    with FakeTensorMode(shape_env=shapes) as mode:
        inputs = mode.from_tensor(torch.ones(4, 6)), mode.from_tensor(torch.tensor(1))
        graph = make_fx(rows_of_an_index)(*inputs).graph
    simplify(graph)
    assert cats(graph) == 1


def test_keywords_are_left_alone() -> None:
    module, _ = traced(halves)
    (cat,) = (node for node in module.graph.nodes if node.target is CAT)
    cat.kwargs = {"dim": 1}
    simplify(module.graph)
    assert cats(module.graph) == 1


def test_calls_with_gradients_become_plain_ones() -> None:
    calls = torch.ops._c10d_functional_autograd

    def forward(x: Tensor) -> Tensor:
        gathered = torch.ops._c10d_functional.wait_tensor(calls.all_gather_into_tensor(x, 2, "0"))
        exchanged = torch.ops._c10d_functional.wait_tensor(calls.all_to_all_single(gathered, [4, 4], [4, 4], "0"))
        return torch.ops._c10d_functional.wait_tensor(calls.reduce_scatter_tensor(exchanged, "sum", 2, "0"))

    with FakeTensorMode():
        graph = make_fx(forward, pre_dispatch=True)(torch.ones(4, 6)).graph
    before = [str(node.target) for node in graph.nodes]
    assert sum("autograd" in target for target in before) == 3
    simplify(graph)
    assert [str(node.target) for node in graph.nodes] == [target.replace("_autograd", "") for target in before]
