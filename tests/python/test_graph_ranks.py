"""Plans of 1,024 ranks in a mesh: the members of a group begin the same collectives in the same order, so none waits
for ever. Nothing is compiled or sent.
"""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from muster.graph._plan.costs import Costs, LinkCosts
from muster.graph._plan.graph_tasks import tasks_of
from muster.graph._plan.schedule import Kind, order
from muster.graph._rewrite.bucket_choice import merge_best
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

c10d = torch.ops._c10d_functional
SIDE, ROWS, COLUMNS = 64, 32, 32
# What a rank does, one after the other: ("start", group, what) or ("wait", group, number of the start in that group).
Actions = list[tuple[str, str, Any]]


def random_graph(seed: int) -> Graph:
    """Products, sums and collectives over the groups "row" and "column", each of values that were drawn before."""
    draw = random.Random(seed)

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        values = list(inputs)
        for _ in range(40):
            x, y = draw.choices(values, k=2)
            kind = draw.choice(("product", "sum", "all_reduce", "all_gather", "reduce_scatter"))
            group, size = draw.choice((("row", COLUMNS), ("column", ROWS)))
            if kind == "product":
                values.append(x @ y)
            elif kind == "sum":
                values.append(x + y)
            elif kind == "all_reduce":
                values.append(c10d.wait_tensor(c10d.all_reduce(x, "sum", group)))
            elif kind == "all_gather":
                values.append(c10d.wait_tensor(c10d.all_gather_into_tensor(x, size, group))[:SIDE])
            else:
                part = c10d.wait_tensor(c10d.reduce_scatter_tensor(x.repeat(size, 1), "sum", size, group))
                values.append(part)
        return sum(values[1:], values[0])

    with FakeTensorMode():
        return make_fx(run)(*[torch.ones(SIDE, SIDE) for _ in range(4)]).graph


def plan(graph: Graph, row: int, column: int) -> Actions:
    """Of the rank at this place of the mesh, whose groups have names of their own."""
    names = {"row": f"row {row}", "column": f"column {column}"}
    links = {names["row"]: LinkCosts(1e-4, 1e9, COLUMNS), names["column"]: LinkCosts(1e-3, 1e8, ROWS)}
    costs = Costs(1e10, 1e10, links)
    own = Graph()
    own.output(own.graph_copy(graph, {}))
    for node in own.nodes:
        if node.args and node.args[-1] in names:
            node.args = (*node.args[:-1], names[node.args[-1]])
    merge_best(own, costs, max_bytes=8 * SIDE * SIDE * 4)
    nodes: list[Node] = list(own.nodes)
    tasks = tasks_of(own, costs)
    begun: collections.Counter[str] = collections.Counter()
    numbers: dict[int, tuple[str, int]] = {}
    actions: Actions = []
    for index in order(tasks, 8 * SIDE * SIDE * 4):
        if tasks[index].kind is Kind.START:
            group = str(nodes[index].args[-1])
            numbers[index] = group, begun[group]
            begun[group] += 1
            shape = list(nodes[index].args[0].meta["val"].shape)  # type: ignore[union-attr]
            actions.append(("start", group, [str(nodes[index].target), shape]))
        elif tasks[index].kind is Kind.WAIT:
            actions.append(("wait", *numbers[tasks[index].start]))
    return actions


def run(ranks: list[Actions], members: dict[str, list[int]]) -> None:
    """Lets all ranks act until none can go on. Fails if one waits then, or if members of a group differ."""
    begun: list[dict[str, list[Any]]] = [collections.defaultdict(list) for _ in ranks]
    left = [collections.deque(actions) for actions in ranks]
    waiting: dict[str, set[int]] = collections.defaultdict(set)
    ready = collections.deque(range(len(ranks)))
    while ready:
        rank = ready.popleft()
        while left[rank]:
            action, group, what = left[rank][0]
            if action == "start":
                begun[rank][group].append(what)
                ready.extend(waiting.pop(group, ()))
            elif any(len(begun[member][group]) <= what for member in members[group]):
                waiting[group].add(rank)
                break
            left[rank].popleft()
    assert not any(left), "a rank waits for ever"
    for group, ranks_of_group in members.items():
        assert all(begun[rank][group] == begun[ranks_of_group[0]][group] for rank in ranks_of_group)


def mesh() -> dict[str, list[int]]:
    rows = {f"row {row}": [row * COLUMNS + column for column in range(COLUMNS)] for row in range(ROWS)}
    return rows | {f"column {column}": [row * COLUMNS + column for row in range(ROWS)] for column in range(COLUMNS)}


@pytest.mark.parametrize("seed", range(2))
def test_a_mesh_of_1024_ranks_never_waits_for_ever(seed: int) -> None:
    graph = random_graph(seed)
    ranks = [plan(graph, rank // COLUMNS, rank % COLUMNS) for rank in range(ROWS * COLUMNS)]
    starts = [action for action in ranks[0] if action[0] == "start"]
    assert len(starts) > 3 and {group for _, group, _ in starts} == {"row 0", "column 0"}
    run(ranks, mesh())


def test_ranks_of_other_processes_make_the_same_plan() -> None:
    """The order of sets and of hashes differs by process."""
    program = (
        "import json, test_graph_ranks as t; print(json.dumps([t.plan(t.random_graph(s), 0, 0) for s in range(3)]))"
    )
    plans = []
    for seed in "0", "1", "2":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        plans.append(json.loads(done.stdout))
    assert plans[0] == plans[1] == plans[2]


def test_the_check_finds_ranks_that_differ() -> None:
    a, b = ("start", "g", "a"), ("start", "g", "b")
    wait = ("wait", "g", 0)
    run([[a, wait]] * 2, {"g": [0, 1]})
    with pytest.raises(AssertionError, match="a rank waits for ever"):
        run([[a, wait], []], {"g": [0, 1]})
    with pytest.raises(AssertionError, match="waits for ever"):
        run([[a, wait, ("start", "h", "a")], [("start", "h", "a"), ("wait", "h", 0), a]], {"g": [0, 1], "h": [0, 1]})
    with pytest.raises(AssertionError):
        run([[a, wait], [b, wait]], {"g": [0, 1]})
