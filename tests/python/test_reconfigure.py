"""Groups whose members change: reconfigure(), which torch has from 2.14 on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import muster.nn
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import distributed_c10d as c10d

import muster

pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason=f"torch {torch.__version__} has none")
SIZE = 3


class Member:
    """A rank whose group is made with enable_reconfigure."""

    def __init__(self, rank: int, folder: str):
        dist.destroy_process_group()
        self.rank = rank
        self._store = dist.FileStore(f"{folder}/handles", -1)
        self._exchanges = 0
        named: dict[str, Any] = {"enable_reconfigure": True}
        dist.init_process_group("muster", init_method=f"file://{folder}/group", rank=rank, world_size=SIZE, **named)

    def handles(self) -> list[str]:
        """Of all ranks."""
        self._exchanges += 1
        torchs: Any = dist
        self._store.set(f"{self._exchanges}/{self.rank}", torchs._get_reconfigure_handle())
        return [self._store.get(f"{self._exchanges}/{rank}").decode() for rank in range(SIZE)]

    def reconfigure(self, uuid: int, handles: list[str] | set[str]) -> None:
        torchs: Any = dist
        torchs._reconfigure(uuid, handles, timeout=timedelta(seconds=60)).wait()

    def wait_for_all(self, name: str) -> None:
        self._store.set(f"{name}/{self.rank}", "")
        self._store.wait([f"{name}/{rank}" for rank in range(SIZE)])


def check_sum(size: int) -> None:
    """Of the ranks, which the group must have."""
    assert dist.get_world_size() == size
    tensor = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size * (size - 1) / 2] * 5


def forms_and_forms_again(rank: int, folder: str) -> None:
    member = Member(rank, folder)
    assert dist._supports_reconfigure()  # type: ignore[attr-defined]
    with pytest.raises(muster.Error, match=r"call reconfigure\(\) first"):
        dist.all_reduce(torch.ones(1))
    handles = member.handles()
    assert len(set(handles)) == SIZE
    member.reconfigure(1, handles)
    assert dist.get_rank() == rank
    check_sum(SIZE)
    member.reconfigure(2, handles[::-1])
    assert dist.get_rank() == SIZE - 1 - rank
    check_sum(SIZE)
    member.reconfigure(3, set(handles))
    assert dist.get_rank() == sorted(handles).index(handles[rank])
    check_sum(SIZE)
    group = dist.new_group(list(range(SIZE)))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == SIZE


def shrinks_and_grows(rank: int, folder: str) -> None:
    member = Member(rank, folder)
    handles = member.handles()
    member.reconfigure(1, handles)
    if rank != 1:
        member.reconfigure(2, [handles[0], handles[2]])
        assert dist.get_rank() == rank // 2
        check_sum(SIZE - 1)
    member.wait_for_all("shrunk")
    member.reconfigure(3 + rank, [handles[rank]])
    check_sum(1)
    member.reconfigure(9, member.handles())
    assert dist.get_rank() == rank
    check_sum(SIZE)


def parts_are_joined(rank: int, folder: str) -> None:
    member = Member(rank, folder)
    handles = member.handles()
    part = handles[:1] if rank == 0 else handles[1:]
    member.reconfigure(1, part)  # with other handles it is another group, also with the same number
    check_sum(len(part))
    member.reconfigure(2, handles)
    check_sum(SIZE)
    received = torch.empty(4)
    works = [
        dist.isend(torch.full((4,), float(rank)), (rank + 1) % SIZE),
        dist.irecv(received, (rank - 1) % SIZE),
    ]
    for work in works:
        assert work is not None
        work.wait()
    assert received.tolist() == [(rank - 1) % SIZE] * 4


def goes_on_after_a_failure(rank: int, folder: str) -> None:
    member = Member(rank, folder)
    handles = member.handles()
    member.reconfigure(1, handles)
    check_sum(SIZE)
    backend: Any = c10d._get_default_group()._get_backend(torch.device("cpu"))
    backend.abort()
    with pytest.raises(muster.Error):
        dist.all_reduce(torch.ones(1))
    member.wait_for_all("aborted")
    member.reconfigure(2, handles)
    check_sum(SIZE)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(muster.PeerLostError):
        for _ in range(1000):
            dist.all_reduce(torch.ones(100_000))
    member.reconfigure(3, [handles[0], handles[2]])
    check_sum(SIZE - 1)


def pending_works_fail(rank: int, folder: str) -> None:
    member = Member(rank, folder)
    handles = member.handles()
    member.reconfigure(1, handles)
    view = muster.group()
    model = muster.nn.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    work = dist.irecv(torch.empty(3), (rank + 1) % SIZE)
    assert work is not None
    member.wait_for_all("pending")
    member.reconfigure(2, handles)
    with pytest.raises(muster.Error):
        work.wait()
    view.barrier()  # over the new group
    with pytest.raises(muster.Error, match=r"being reconfigured|left"):
        model(torch.ones(1, 2)).sum().backward()
    check_sum(SIZE)


def mistakes_are_errors(rank: int, folder: str) -> None:
    member = Member(rank, folder)
    handles = member.handles()
    own = handles[rank]
    member.reconfigure(1, [own])
    with pytest.raises(ValueError, match="uuid 1 was already used"):
        member.reconfigure(1, [own])
    with pytest.raises(ValueError, match=r"handle, muster-\w+, is not among the 1 handles"):
        member.reconfigure(2, [handles[(rank + 1) % SIZE]])
    with pytest.raises(ValueError, match="is listed twice"):
        member.reconfigure(3, [own, own])
    check_sum(1)
    if rank == 0:
        torchs: Any = dist
        with pytest.raises(muster.TimeoutError, match="1 of 2 ranks came"):
            torchs._reconfigure(4, handles[:2], timeout=timedelta(seconds=1))
        with pytest.raises(muster.Error):
            dist.all_reduce(torch.ones(1))
        member.reconfigure(5, [own])
        check_sum(1)


@pytest.mark.parametrize(
    ("body", "lost"),
    [
        (forms_and_forms_again, ()),
        (shrinks_and_grows, ()),
        (parts_are_joined, ()),
        (goes_on_after_a_failure, (1,)),
        (pending_works_fail, ()),
        (mistakes_are_errors, ()),
    ],
)
def test_three_ranks(body: Callable[[int, str], None], lost: tuple[int, ...], tmp_path: Path) -> None:
    run_ranks(SIZE, body, str(tmp_path), lost=lost)
