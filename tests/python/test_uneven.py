"""Tests gather and scatter of blocks that differ in length."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import muster

SIZE = 3


def block(rank: int, rows: int) -> torch.Tensor:
    return torch.arange(2 * rows, dtype=torch.float64).view(rows, 2) + 1000 * rank


def gather_and_scatter(rank: int) -> None:
    group = muster.group()
    for splits in ([1, 2, 3], [5, 0, 1], [0, 0, 0], [20_000, 1, 70_000], [4, 4, 4]):
        blocks = [block(each, rows) for each, rows in enumerate(splits)]
        whole = torch.cat(blocks)
        for root in range(SIZE):
            output = torch.empty_like(whole) if rank == root else None
            group.gather(output, blocks[rank], root, splits if rank == root else None)
            assert output is None or torch.equal(output, whole), (splits, root)
            received = torch.empty_like(blocks[rank])
            work = group.scatter(received, whole if rank == root else None, root, splits, async_op=True, timeout=60)
            assert work is not None
            work.wait()
            assert torch.equal(received, blocks[rank]), (splits, root)
    even = torch.empty(2 * SIZE) if rank == 1 else None
    group.gather(even, torch.full((2,), float(rank)), 1)
    assert even is None or even.tolist() == [0, 0, 1, 1, 2, 2]
    part = torch.empty(2)
    group.scatter(part, torch.arange(6.0) if rank == 1 else None, 1)
    assert part.tolist() == [2 * rank, 2 * rank + 1]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_blocks_may_differ_in_length(transport: str) -> None:
    run_ranks(SIZE, gather_and_scatter, env={"MUSTER_TRANSPORT": transport})


def wrong_blocks(rank: int) -> None:
    group, part = muster.group(), torch.ones(2)
    for root, output, splits, text in [
        (3, None, None, "root 3 is out of range for world size 3"),
        (rank, None, None, f"the root, rank {rank}, has the output, and only the root; this is rank {rank}"),
        ((rank + 1) % SIZE, part, None, "and only the root"),
        (rank, torch.empty(7), None, "the output has 7 rows for 3 ranks: it needs splits"),
        (rank, torch.empty(7), [2, 2, 2], "splits do not add up to its first dimension, 7"),
        (rank, torch.empty(7), [3, 4], "2 output splits for 3 ranks"),
    ]:
        with pytest.raises(muster.ArgumentError, match=re.escape(text)):
            group.gather(output, part, root, splits)
    with pytest.raises(muster.ArgumentError, match="has the input, and only the root"):
        group.scatter(part, None, rank)
    # torch's own call has no way to tell the other ranks.
    outputs = [torch.empty(rows) for rows in (2, 3, 4)]
    if rank == 0:
        with pytest.raises(muster.ArgumentError, match=r"muster\.Group has a gather for blocks that differ"):
            dist.gather(part, outputs)
    dist.barrier()


def test_wrong_blocks_are_named() -> None:
    run_ranks(SIZE, wrong_blocks)


def expect_too_much(rank: int) -> str:
    group: Any = muster.group()
    with pytest.raises(muster.MismatchError) as caught:
        group.gather(torch.empty(7) if rank == 0 else None, torch.ones(2), 0, [2, 3, 2])
        dist.barrier()
    return str(caught.value)


def test_a_rank_that_sends_another_length_is_named() -> None:
    assert "rank 1" in run_ranks(SIZE, expect_too_much, env={"MUSTER_DEBUG": "detail"})[0]
