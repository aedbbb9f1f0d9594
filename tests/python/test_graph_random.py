"""Random graphs with collectives give what they give without a graph, and keep the buffers of pending collectives."""

from __future__ import annotations

import contextlib
import random
import re
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import muster.graph
import pytest
import torch
import torch.distributed as dist
from muster.graph._plan import inductor
from muster.graph._plan.schedule import Task, order
from ranks import run_ranks
from torch._inductor.utils import run_and_get_code

SIDE = 8
GRAPHS = 12
Matrix = torch.Tensor
# muster.all_reduce_ has ended when it returns.
OPERATOR = r"(?:_c10d_functional\.(?!wait_tensor)|muster\.(?!all_reduce_\.))\w+"
START = re.compile(rf"^(?:(\w+) = )?torch\.ops\.{OPERATOR}\.default\((.*)\)$")
WAIT = re.compile(r"^torch\.ops\._c10d_functional\.wait_tensor\.default\((\w+)\)$")
PART = re.compile(r"^(\w+) = (\w+)\[(\d+)\]$")  # of an operator with several results
BUFFER = re.compile(r"\b(?:buf|arg|primals_)\w+")


def reduced(x: Matrix, group: Any) -> Matrix:
    y = x * 0.5
    dist.all_reduce(y, group=group)
    return y


def gathered(x: Matrix, group: Any) -> Matrix:
    whole = x.new_empty(2 * SIDE, SIDE)
    dist.all_gather_into_tensor(whole, x, group=group)
    return whole[:SIDE] - whole[SIDE:]


def scattered(x: Matrix, group: Any) -> Matrix:
    part = torch.empty_like(x)
    dist.reduce_scatter_tensor(part, torch.cat([x, x.relu()]), group=group)
    return part * 0.5


def exchanged(x: Matrix, group: Any) -> Matrix:
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x, group=group)
    return y


def sent(x: Matrix, group: Any) -> Matrix:
    y = torch.empty_like(x)
    other = 1 - group.rank()
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, other, group), dist.P2POp(dist.irecv, y, other, group)]
    ):
        work.wait()
    return y


def overwritten(x: Matrix, group: Any) -> Matrix:
    """Gathers x, and then reduces it in place, over another group if `group` is not the default one."""
    whole = gathered(x, group)
    dist.all_reduce(x)
    return whole


COLLECTIVES: list[Callable[[Matrix, Any], Matrix]] = [reduced, gathered, scattered, exchanged, sent, overwritten]


def draw(seed: int, groups: list[Any]) -> Callable[[Matrix, Matrix], tuple[Matrix, ...]]:
    """A function with about 14 operations, of which half are collectives. Some of them write to the second input:
    Inductor copies other tensors before it reduces them in place.
    """
    numbers = random.Random(seed)
    plan = [
        (numbers.choice([None, *COLLECTIVES, None, None]), numbers.random(), numbers.random(), numbers.randrange(2))
        for _ in range(14)
    ]

    def function(x: Matrix, written: Matrix) -> tuple[Matrix, ...]:
        values = [x]
        for collective, first, second, group in plan:
            a, b = values[int(first * len(values))], values[int(second * len(values))]
            if collective is not None:
                values.append(collective(written if collective is overwritten else a, groups[group]))
            else:
                values.append([(a @ b) / SIDE, a + b][group])
        return (*values[1:], written)

    return function


def reused(code: str) -> list[str]:
    """The lines that give up memory of a collective that is pending, or begin another one that writes to it."""
    pending: dict[str, set[str]] = {}  # by the buffer that is waited for
    lists: dict[str, list[str]] = {}  # the inputs of an operator with several results, one for each
    found = []
    for line in code[code.index("def call") :].splitlines():
        line = line.strip()
        if match := START.match(line):
            inputs = BUFFER.findall(match[2])
            if match[2].startswith("["):
                lists[match[1]] = inputs
            else:
                name = match[1] or inputs[0]
                if not match[1] and any(name in buffers for buffers in pending.values()):
                    found.append(line)
                pending[name] = {*inputs, name}
        elif (match := PART.match(line)) and match[2] in lists:
            pending[match[1]] = {lists[match[2]][int(match[3])], match[1]}
        elif match := WAIT.match(line):
            pending.pop(match[1], None)
        else:
            gone = re.findall(r"\bdel (\w+)", line) + re.findall(r"out=(\w+)", line)
            found += [line for buffers in pending.values() if buffers & set(gone)]
    return found


def order_by(choose: Callable[[list[int]], int]) -> Callable[..., list[int]]:
    """In place of order(): of the tasks that can run, `choose` names the next one. Equal at all ranks."""

    def ordered(tasks: Sequence[Task], max_bytes: float) -> list[int]:
        left, result = set(range(len(tasks))), []
        while left:
            result.append(choose(sorted(index for index in left if not tasks[index].needs & left)))
            left.remove(result[-1])
        return result

    return ordered


@contextlib.contextmanager
def order_of_tasks(order: Callable[..., list[int]]) -> Iterator[None]:
    """The order is not in the key of Inductor's cache."""
    with unittest.mock.patch.object(inductor, "order", order), torch._inductor.config.patch(fx_graph_cache=False):
        yield


def compare_graphs(rank: int, draws_order: bool) -> list[str]:
    torch.set_num_threads(1)
    groups = [dist.group.WORLD, dist.new_group()]
    failures = []
    for seed in range(GRAPHS):
        torch._dynamo.reset()
        function = draw(seed, groups)
        torch.manual_seed(rank)
        x, written = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
        backend = muster.graph.backend(muster.graph.Config(buckets=seed % 2 == 0))
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        with order_of_tasks(order_by(random.Random(seed).choice) if draws_order else order):
            result, codes = run_and_get_code(compiled, x, written.clone())
        torch.testing.assert_close(result, function(x, written), msg=f"seed {seed}")
        failures += [f"seed {seed}: {line}" for code in codes for line in reused(code)]
    return failures


def read_late(rank: int) -> None:
    """Only the order of the two collectives says that `positive` is multiplied before it is added to."""

    def function(x: Matrix) -> tuple[Matrix, Matrix]:
        positive = x.relu()
        part = x.new_empty(SIDE // 2, SIDE)
        dist.reduce_scatter_tensor(part, positive @ x)
        whole = x.new_empty(2 * SIDE, SIDE)
        dist.all_gather_into_tensor(whole, x)
        return part, positive + whole[:SIDE]

    torch.set_num_threads(1)
    x = torch.randn(SIDE, SIDE)
    with order_of_tasks(order_by(max)):
        result = torch.compile(function, backend="muster", fullgraph=True)(x)
    torch.testing.assert_close(result, function(x))


def test_a_kernel_writes_over_its_input_only_after_all_readers() -> None:
    run_ranks(2, read_late, timeout=500)


@pytest.mark.parametrize("draws_order", [False, True], ids=["planned order", "any order"])
def test_random_graphs(draws_order: bool) -> None:
    for failures in run_ranks(2, compare_graphs, draws_order, timeout=500):
        assert not failures


def test_the_check_of_buffers_finds_a_reuse() -> None:
    code = """def call(args):
        buf1 = torch.ops.muster.reduce.default(buf0, 'sum', 0, '0')
        buf2 = buf0; del buf0  # reuse
        torch.ops._c10d_functional.wait_tensor.default(buf1)
        torch.ops.muster.all_reduce_.default(buf1, 'sum', '0')
        del buf1
    """
    assert reused(code) == ["buf2 = buf0; del buf0  # reuse"]


def test_the_check_of_buffers_finds_a_write() -> None:
    write = "torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '0')"
    code = f"""def call(args):
        buf1 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf0, 2, '0')
        {write}
    """
    assert reused(code) == [write]
