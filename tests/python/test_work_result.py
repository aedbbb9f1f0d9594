"""Tests Work.get_future_result(): how an operation ended, as a number that never raises."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch._C._distributed_c10d import WorkResult  # type: ignore[attr-defined]

import muster


def result_of(work: Any) -> WorkResult:
    return WorkResult(work.get_future_result().wait())


def each_result(rank: int) -> None:
    done = dist.all_reduce(torch.ones(4), async_op=True)
    assert result_of(done) == WorkResult.SUCCESS
    late, aborted = (dist.new_group(pg_options=muster.Options(timeout=60)) for _ in range(2))
    for group in (late, aborted):
        dist.barrier(group)
    if rank == 0:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), late)
        data = torch.ones(4)
        receive: Any = dist.irecv(torch.empty(2), 1, group=late)
        works = [dist.all_reduce(data, group=late, async_op=True) for _ in range(2)]
        assert result_of(receive) == WorkResult.TIMEOUT
        assert result_of(works[0]) == WorkResult.TIMEOUT
        with pytest.raises(muster.TimeoutError):
            works[0].wait()
        assert result_of(works[1]) != WorkResult.SUCCESS
        pending = dist.all_reduce(data, group=aborted, async_op=True)
        before = pending.get_future_result()  # asked for before the end
        aborted.abort()
        assert WorkResult(before.wait()) == result_of(pending) == WorkResult.COMM_ERROR
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lost = dist.all_reduce(torch.ones(4), async_op=True)
    assert result_of(lost) == WorkResult.COMM_ERROR


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_result_says_how_an_operation_ended(transport: str) -> None:
    run_ranks(2, each_result, lost=(1,), env={"MUSTER_TRANSPORT": transport})
