"""Ranks whose graphs differ, although they run the same collectives: valid programs that must compile and run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks

TIMEOUT = 400  # seconds: Inductor calls a C++ compiler, and the machine may be loaded
SIDE = 64
Step = Callable[[torch.Tensor], Any]


def other_inputs(rank: int) -> Step:
    """The second reduction needs the first one at rank 0 only. At rank 1, the second one is more urgent."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x @ x
        dist.all_reduce(first)
        second = (first if rank == 0 else x) @ x
        dist.all_reduce(second)
        return first, second @ x @ x @ x

    return step


def other_operators(rank: int) -> Step:
    """Only some ranks could merge the reductions."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = x + 1, x + 2
        dist.all_reduce(first)
        second = second * first if rank == 0 else second * 2
        dist.all_reduce(second)
        return first, second

    return step


def other_groups(rank: int) -> Step:
    """The last rank is in no second group."""
    first_two = dist.new_group([0, 1])

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = x + 1, x + 2
        dist.all_reduce(first)
        dist.all_reduce(second, group=first_two)
        return first, second

    return step


def other_order_of_groups(rank: int) -> Step:
    """Rank 0 is in one group only, and uses it first; the others use it last."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = [x + 1, x + 2]
        for result, group in zip(results, groups if rank == 0 else groups[::-1], strict=True):
            dist.all_reduce(result, group=group)
        return tuple(results)

    return step


def compile_and_compare(rank: int) -> None:
    torch.set_num_threads(1)
    x = torch.eye(SIDE) * (rank + 1)
    for make in (other_inputs, other_operators, other_groups, other_order_of_groups):
        step = make(rank)
        expected = step(x)
        torch.testing.assert_close(torch.compile(step, backend="muster", fullgraph=True)(x), expected)


def test_graphs_that_differ_by_rank_give_the_results_of_the_program() -> None:
    run_ranks(3, compile_and_compare, timeout=TIMEOUT)
