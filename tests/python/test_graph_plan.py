"""The order of a graph's tasks: it is valid, equal at all ranks, and close to the best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from muster.graph._backend import _digest
from muster.graph._plan.costs import Costs, LinkCosts
from muster.graph._plan.inductor import tasks_of
from muster.graph._plan.schedule import Kind, Task, lower_bound, order, timeline
from ranks import run_ranks
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

MS = 1e-3


def gathered_layers(count: int, wire: float, compute: float, gathered: int = 0) -> list[Task]:
    """As of FSDP: each layer gathers its weights, waits for them, and multiplies."""
    tasks: list[Task] = []
    last = None
    for _ in range(count):
        start = len(tasks)
        tasks.append(Task(Kind.START, wire, bytes=gathered))
        tasks.append(Task(Kind.WAIT, 0.0, frozenset({start}), start))
        needs = {start + 1} if last is None else {start + 1, last}
        last = len(tasks)
        tasks.append(Task(Kind.COMPUTE, compute, frozenset(needs)))
    return tasks


@st.composite
def graphs(draw: st.DrawFn) -> list[Task]:
    tasks: list[Task] = []
    for _ in range(draw(st.integers(1, 25))):
        count = len(tasks)
        needs = frozenset(draw(st.sets(st.integers(0, count - 1), max_size=3))) if count else frozenset()
        seconds = draw(st.integers(0, 9)) * MS
        if draw(st.booleans()):
            tasks.append(Task(Kind.START, seconds, needs, bytes=draw(st.integers(0, 10))))
            tasks.append(Task(Kind.WAIT, 0.0, frozenset({count}), count))
        else:
            tasks.append(Task(Kind.COMPUTE, seconds, needs))
    return tasks


def most_bytes(tasks: list[Task], places: list[int]) -> int:
    """The most memory that results of collectives need at a time."""
    at = {index: place for place, index in enumerate(places)}
    until = {}
    for index, task in enumerate(tasks):
        if task.kind is Kind.WAIT:
            until[task.start] = max(
                [at[index], *(at[user] for user, other in enumerate(tasks) if index in other.needs)]
            )
    return max(
        sum(tasks[start].bytes for start, end in until.items() if at[start] <= place <= end)
        for place in range(len(tasks))
    )


@given(graphs())
@settings(deadline=None)
def test_an_order_is_valid_and_within_bounds(tasks: list[Task]) -> None:
    places = order(tasks)
    assert sorted(places) == list(range(len(tasks)))
    at = {index: place for place, index in enumerate(places)}
    assert all(at[need] < at[index] for index, task in enumerate(tasks) for need in task.needs)
    total = timeline(tasks, places).total
    assert lower_bound(tasks) <= total + 1e-12
    # Graham's bound for two resources, each of which is busy or waits for the longest path.
    assert total <= 2 * lower_bound(tasks) + lower_bound(tasks) + 1e-12


@given(graphs(), st.integers(0, 30))
@settings(deadline=None)
def test_an_order_with_little_memory_is_valid(tasks: list[Task], max_bytes: int) -> None:
    places = order(tasks, max_bytes)
    at = {index: place for place, index in enumerate(places)}
    assert all(at[need] < at[index] for index, task in enumerate(tasks) for need in task.needs)


def test_messages_of_later_layers_are_hidden() -> None:
    tasks = gathered_layers(8, wire=2 * MS, compute=2 * MS)
    assert timeline(tasks, range(len(tasks))).exposed == pytest.approx(16 * MS)
    planned = timeline(tasks, order(tasks))
    assert planned.exposed == pytest.approx(2 * MS)  # of the first layer, which nothing can hide
    assert planned.total == pytest.approx(lower_bound(tasks))


def test_the_memory_of_early_results_is_bounded() -> None:
    tasks = gathered_layers(8, wire=1 * MS, compute=2 * MS, gathered=100)
    assert most_bytes(tasks, order(tasks)) > 200
    bounded = order(tasks, max_bytes=200)
    assert most_bytes(tasks, bounded) <= 200
    assert timeline(tasks, bounded).exposed == pytest.approx(1 * MS)


def test_a_gradient_is_sent_as_soon_as_it_is_there_and_awaited_last() -> None:
    # Four layers of a backward pass: each computes a gradient, which is reduced and only needed by the last task.
    tasks: list[Task] = []
    waits = []
    last: set[int] = set()
    for _ in range(4):
        tasks.append(Task(Kind.COMPUTE, 2 * MS, frozenset(last)))
        last = {len(tasks) - 1}
        tasks.append(Task(Kind.START, 1 * MS, frozenset(last)))
        tasks.append(Task(Kind.WAIT, 0.0, frozenset({len(tasks) - 1}), len(tasks) - 1))
        waits.append(len(tasks) - 1)
    tasks.append(Task(Kind.COMPUTE, 0.0, frozenset(waits)))
    assert timeline(tasks, order(tasks)).total == pytest.approx(9 * MS)


def test_a_gradient_is_sent_before_the_next_layer_is_computed() -> None:
    # Two products for each layer: one gives the gradient of its weights, which is reduced; the other one leads to the
    # layer below. The messages take longer than all products.
    tasks: list[Task] = []
    above: set[int] = set()
    for _ in range(4):
        tasks.append(Task(Kind.COMPUTE, 2 * MS, frozenset(above)))
        tasks.append(Task(Kind.COMPUTE, 2 * MS, frozenset(above)))
        weights, below = len(tasks) - 2, len(tasks) - 1
        tasks.append(Task(Kind.START, 8 * MS, frozenset({weights})))
        tasks.append(Task(Kind.WAIT, 0.0, frozenset({below + 1}), below + 1))
        above = {below}
    assert timeline(tasks, order(tasks)).total == pytest.approx((2 + 4 * 8) * MS)


def test_what_is_needed_first_is_sent_first() -> None:
    """The first layer needs a small message, too, which is ready a moment later than the large ones."""
    large = [Task(Kind.START, 4.0, bytes=4) for _ in range(4)]
    tasks = [Task(Kind.COMPUTE, 1e-3), Task(Kind.START, 0.1, frozenset([0]), bytes=1), *large]
    tasks += [Task(Kind.WAIT, 0.0, frozenset([start]), start) for start in range(1, 6)]
    for layer in range(4):
        before = {6, 7} if layer == 0 else {len(tasks) - 1, 7 + layer}
        tasks.append(Task(Kind.COMPUTE, 3.0, frozenset(before)))
    found = timeline(tasks, order(tasks))
    assert found.total == pytest.approx(4 * 4.0 + 0.1 + 3.0, abs=0.01), found


def test_a_circle_is_an_error() -> None:
    with pytest.raises(ValueError, match="circle"):
        order([Task(Kind.COMPUTE, 1.0, frozenset({1})), Task(Kind.COMPUTE, 1.0, frozenset({0}))])


def tasks_in_inductor(step: Callable[..., Any], *inputs: torch.Tensor) -> list[Task]:
    """Of a step that uses the default group."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    tasks: list[Task] = []

    def keep(nodes: list[Any]) -> list[Any]:
        costs = Costs(flops_per_second=1e9, links={group: LinkCosts(1e-4, 1e9, ranks=2)})
        tasks.extend(tasks_of(nodes, costs, keeps_order=False))
        return nodes

    options = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [keep],
        "force_disable_caches": True,
    }
    with FakeTensorMode() as mode, torch._inductor.config.patch(options):
        fakes = [mode.from_tensor(each) for each in inputs]
        compile_fx_inner(make_fx(step)(*fakes), fakes)
    return tasks


def tasks_of_writes(rank: int) -> list[Task]:
    c10d: Any = torch.ops._c10d_functional
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, group))
        c10d.wait_tensor(c10d.all_reduce_(x, "sum", group))
        return gathered, c10d.wait_tensor(c10d.all_gather_into_tensor(y, 2, group))

    return tasks_in_inductor(step, torch.ones(4, 4), torch.ones(4, 4))


def tasks_of_product(rank: int) -> list[Task]:
    c10d: Any = torch.ops._c10d_functional
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def step(x: torch.Tensor) -> Any:
        return [c10d.wait_tensor(c10d.all_reduce(x @ x, "sum", group))]

    return tasks_in_inductor(step, torch.ones(100, 100))


def test_a_product_that_is_reduced_in_place_takes_its_time() -> None:
    (tasks,) = run_ranks(1, tasks_of_product)
    (product,) = (task for task in tasks if task.kind is Kind.COMPUTE)
    assert product.seconds == pytest.approx(2 * 100**3 / 1e9, rel=0.05)


def test_a_collective_writes_a_tensor_only_after_another_has_read_it() -> None:
    (tasks,) = run_ranks(1, tasks_of_writes)
    first, second, third = (index for index, task in enumerate(tasks) if task.kind is Kind.START)
    waits = {task.start: index for index, task in enumerate(tasks) if task.kind is Kind.WAIT}
    assert waits[first] in tasks[second].needs
    assert not tasks[third].needs, "of another tensor"


def digest_with_branch(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"), graph.get_attr("branch")))
    return _digest(torch.fx.GraphModule({"branch": torch.fx.symbolic_trace(function)}, graph), [])


def test_the_digest_of_a_graph_covers_its_branches() -> None:
    assert digest_with_branch(lambda x: x + 1) == digest_with_branch(lambda x: x + 1)
    assert digest_with_branch(lambda x: x + 1) != digest_with_branch(lambda x: x * 1)
