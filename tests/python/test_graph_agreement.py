"""Ranks whose graphs differ: what they find out about each other, and that valid programs compile and run."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import muster.graph
import pytest
import torch
import torch.distributed as dist
from muster.errors import MismatchError, TimeoutError  # noqa: A004
from muster.graph._plan.agreement import Call, Digest, compare
from ranks import run_ranks
from torch._dynamo.exc import BackendCompilerFailed

TIMEOUT = 400  # seconds: Inductor calls a C++ compiler, and the machine may be loaded
SIDE = 64
Step = Callable[[torch.Tensor], Any]
LIMIT = timedelta(seconds=60)


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


def other_order_of_starts(rank: int) -> Step:
    """Rank 0 begins calls of two groups in another order than the others. No rank waits before it has begun both."""
    groups = [dist.new_group(), dist.new_group()]

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = [x + 1, x @ x + 2]
        places = [0, 1] if rank == 0 else [1, 0]
        works: list[Any] = [dist.all_reduce(results[each], group=groups[each], async_op=True) for each in places]
        for work in works:
            work.wait()
        return tuple(results)

    return step


def compile_and_compare(rank: int) -> None:
    torch.set_num_threads(1)
    x = torch.eye(SIDE) * (rank + 1)
    for make in (other_inputs, other_operators, other_groups, other_order_of_groups, other_order_of_starts):
        step = make(rank)
        expected = step(x)
        torch.testing.assert_close(torch.compile(step, backend="muster", fullgraph=True)(x), expected)


def test_graphs_that_differ_by_rank_give_the_results_of_the_program() -> None:
    run_ranks(3, compile_and_compare, timeout=TIMEOUT)


def ring(rank: int) -> list[Any]:
    """Each rank shares a group with the next one. Both use it first, or both use it last."""
    size = dist.get_world_size()
    pairs = [dist.new_group([first, (first + 1) % size]) for first in range(size)]
    return [pairs[each] for each in sorted((rank, (rank - 1) % size), key=lambda each: each % 2)]


def compare_in_a_ring(rank: int) -> list[tuple[bool, bool]]:
    groups = ring(rank)
    digests = [Digest("a", "a"), Digest("a", "b" if rank == 0 else "a"), Digest("b" if rank == 0 else "a", "a")]
    return [compare(groups, digest, {}, LIMIT) for digest in digests]


def test_ranks_that_groups_connect_find_the_same_difference() -> None:
    for answers in run_ranks(6, compare_in_a_ring):
        assert answers == [(True, True), (True, False), (False, False)]


def compare_other_calls(rank: int) -> None:
    groups = ring(rank)
    names = [group.group_name for group in groups]
    calls = {names[-1]: [Call("all_reduce of 4 float32", f"([{rank}, 2], at train.py:7)")] * (1 + (rank == 3))}
    calls |= {name: [Call("all_reduce of 4 float32")] for name in names[:-1]}
    message = (
        r"collective 1 of group \w+ is all_reduce of 4 float32 \(\[3, 2\], at train.py:7\) at rank 3, and .* has only 1"
    )
    with pytest.raises(MismatchError, match=message):
        compare(groups, Digest("a", "a"), calls, LIMIT)
    assert compare(groups, Digest("a", "a"), {}, LIMIT) == (True, True), "the next graphs are compared again"


def test_all_connected_ranks_name_the_call_that_differs() -> None:
    run_ranks(6, compare_other_calls)


def compile_with_other_options(rank: int) -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = x + 1, x + 2
        dist.all_reduce(first)
        dist.all_reduce(second)
        return first, second

    message = r"all_reduce_ \(of buf\d+, at (/\S+\.py):(\d+)\) at rank 1, and the graph of rank 0 has only 1"
    with pytest.raises(BackendCompilerFailed, match=message) as failed:
        torch.compile(step, backend=muster.graph.backend(muster.graph.Config(buckets=rank == 0)))(torch.ones(SIDE))
    found = re.search(message, str(failed.value))
    assert found is not None
    path, line = found.groups()
    assert "all_reduce_" in Path(path).read_text().split("\n")[int(line) - 1]


def test_a_difference_in_the_compiled_code_names_the_buffer_and_the_line() -> None:
    run_ranks(2, compile_with_other_options, timeout=TIMEOUT)


def compare_without_the_last(rank: int) -> None:
    groups = ring(rank)
    if rank < 3:
        with pytest.raises(
            TimeoutError, match=f"rank 1 of group .* has not compiled the graph that rank {rank} compiles"
        ):
            compare(groups, Digest("a", "a"), {}, timedelta(seconds=5))
    dist.barrier()
    assert compare(groups, Digest("a", "a"), {}, LIMIT) == (True, True)


def test_all_connected_ranks_name_the_one_that_compiles_nothing() -> None:
    run_ranks(4, compare_without_the_last)


def compare_in_several_lives(rank: int, folder: str) -> None:
    """Rank 0 has compiled alone before: it knows a default group of the same name."""
    digest = Digest("a", "a")
    dist.destroy_process_group()
    if rank == 0:
        dist.init_process_group("muster", store=dist.FileStore(f"{folder}/alone", 1), rank=0, world_size=1)
        for _ in range(2):
            assert compare([dist.group.WORLD], digest, {}, LIMIT) == (True, True)
        dist.destroy_process_group()
    dist.init_process_group("muster", store=dist.FileStore(f"{folder}/both", 2), rank=rank, world_size=2)
    assert compare([dist.group.WORLD], digest, {}, LIMIT) == (True, True)


def test_a_group_that_is_formed_again_compares_from_the_beginning(tmp_path: Path) -> None:
    run_ranks(2, compare_in_several_lives, str(tmp_path))


def compare_in_one_store(rank: int, path: str) -> None:
    """The second group must not read what the ranks of the first one wrote."""
    dist.destroy_process_group()
    for digest in (Digest("a", "a"), Digest(f"b{rank}", "b")):
        dist.init_process_group("muster", store=dist.FileStore(path, 2), rank=rank, world_size=2)
        assert compare([dist.group.WORLD], digest, {}, LIMIT) == ((digest.sizes == "a",) * 2)
        dist.destroy_process_group()
    dist.init_process_group("muster", store=dist.FileStore(path, 2), rank=rank, world_size=2)


def test_a_group_that_is_formed_again_in_one_store_compares_anew(tmp_path: Path) -> None:
    run_ranks(2, compare_in_one_store, str(tmp_path / "store"))
