"""Tests coalescing blocks of torch.distributed that fail, over real processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import distributed_c10d as c10d

import muster

SIZE = 3


def cancel_blocks(rank: int) -> None:
    """Makes blocks that fail. Calls after them must work as if there had been no block."""
    group, cpu = c10d._get_default_group(), torch.device("cpu")

    def check_calls() -> None:
        data = torch.ones(2)
        dist.all_reduce(data)
        assert data.tolist() == [3.0, 3.0]
        gathered = torch.empty(SIZE)
        dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
        assert gathered.tolist() == [0.0, 1.0, 2.0]

    for device in (None, cpu):
        kept = torch.full((2,), float(rank))
        with pytest.raises(KeyError), c10d._coalescing_manager(device=device, async_ops=True):
            dist.all_reduce(kept) if device is None else dist.broadcast(kept, src=1)
            raise KeyError
        check_calls()
        assert kept.tolist() == [rank, rank], "nothing of the block has begun"
    with pytest.raises(ValueError, match="Tag must be"), c10d._coalescing_manager(device=cpu):
        dist.broadcast(kept, src=1)
        dist.isend(kept, 0 if rank else 1, tag=-1)
    check_calls()

    group._start_coalescing(cpu)
    works = [group.broadcast(kept, root=1)]
    with pytest.raises(ValueError, match="is out of range"):
        group.broadcast(kept, root=SIZE)
    for work in works:
        with pytest.raises(muster.AbortedError, match="one of its calls failed"):
            work.wait()
    check_calls()
    with pytest.raises(ValueError, match="no open coalescing block"):
        group._end_coalescing(cpu)


def test_a_failed_coalescing_block_is_discarded() -> None:
    run_ranks(SIZE, cancel_blocks)
