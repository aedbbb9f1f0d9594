"""Tests operations on whole process groups, the information that Works give, and muster.Group."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d as c10d

import muster
from muster import _backend


def world() -> Any:
    return c10d._get_default_group()


def backend() -> Any:
    return world()._get_backend(torch.device("cpu"))


def split_groups(rank: int) -> None:
    assert backend().supports_splitting
    for _ in range(2):  # a group may be split again
        part = world().split_group([0, 2], group_name=None)
        assert (part is None) == (rank == 1)
        if part is None:
            continue
        data = torch.full((2,), float(rank))
        part.allreduce([data]).wait()
        assert data.tolist() == [2.0, 2.0]
        assert (part.rank(), part.size()) == (rank // 2, 2)
    merged = world().merge_remote_group(world().get_group_store(), size=3, group_name="again")
    data = torch.full((1,), float(rank))
    merged.allreduce([data]).wait()
    assert data.item() == 3


def shrink_group(rank: int) -> None:
    data = torch.ones(1)
    dist.all_reduce(data)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(muster.PeerLostError):
        for _ in range(1000):
            dist.all_reduce(torch.ones(100_000))
    dist.shrink_group([1], shrink_flags=c10d.SHRINK_ABORT)
    assert dist.get_world_size() == 2
    data = torch.full((3,), float(rank))
    dist.all_reduce(data)
    assert data.tolist() == [2.0] * 3
    dist.barrier()


def error_of(group: Any) -> Any:
    """The backend's getError(). torch's Python exposes it only for a backend in a wrapper."""
    unused = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=1))
    return c10d._ProcessGroupWrapper(group._get_backend(torch.device("cpu")), unused).get_error()


def error_types(rank: int) -> None:
    late, aborted, unlike = groups = [dist.new_group(timeout=timedelta(seconds=60)) for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
        assert error_of(group) == ErrorType.SUCCESS
    if rank != 1:
        c10d._set_pg_timeout(timedelta(seconds=1), late)
        with pytest.raises(muster.TimeoutError):
            dist.all_reduce(torch.ones(1), group=late)
        assert error_of(late) == ErrorType.TIMEOUT
    aborted.abort()
    assert error_of(aborted) == ErrorType.COMM_ERROR
    with pytest.raises(muster.Error):
        dist.all_reduce(torch.ones(2 + rank), group=unlike)
    assert error_of(unlike) == ErrorType.COMM_ERROR
    assert error_of(world()) == ErrorType.SUCCESS
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(muster.PeerLostError):
        for _ in range(1000):
            dist.all_reduce(torch.ones(100_000))
    assert error_of(world()) == ErrorType.REMOTE_ERROR


def monitored(rank: int) -> None:
    dist.monitored_barrier()
    group = dist.new_group()
    if rank == 0:
        with pytest.raises(RuntimeError, match="1, 2"):
            dist.monitored_barrier(group, timedelta(seconds=1), wait_all_ranks=True)
    with pytest.raises(muster.TimeoutError, match=f"Rank {rank} timed out"):
        dist.monitored_barrier(group, timedelta(0))
    dist.barrier()
    gloo = dist.new_group(backend="gloo")
    dist.monitored_barrier(gloo)  # torch's own monitored barrier
    if rank != 0:
        other: Any = dist.GroupMember.NON_GROUP_MEMBER  # torch's group handle at ranks outside the group
        dist.monitored_barrier(other)
    dist.barrier()


def make_subgroups(rank: int) -> None:
    """Each rank splits its own half. torch gives the parts of both halves the same names."""
    half, _ = dist.new_subgroups_by_enumeration([[0, 1], [2]])
    assert isinstance(half, dist.ProcessGroup)
    part, _ = dist.new_subgroups(group_size=1, group=half)
    assert isinstance(part, dist.ProcessGroup)
    data = torch.full((2,), float(rank))
    dist.all_reduce(data, group=part)
    assert data.tolist() == [rank, rank]
    dist.barrier()


def timeouts(rank: int) -> None:
    group = dist.new_group()
    before = muster.group(group).timeout
    for refused in (timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(ValueError, match="the timeout must be > 0"):
            c10d._set_pg_timeout(refused, group)
    assert muster.group(group).timeout == before
    data = torch.ones(1)
    dist.all_reduce(data, group=group)
    assert data.item() == 3
    c10d._set_pg_timeout(timedelta(seconds=1), group)
    assert muster.group(group).timeout == 1
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(muster.TimeoutError):
            dist.all_reduce(torch.ones(1), group=group)
        assert time.monotonic() - began < 60, "not the default of half an hour"
    dist.barrier()


def name_the_mismatch(rank: int) -> None:
    seen: list[Any] = []
    world()._register_on_completion_hook(seen.append)
    dist.all_reduce(torch.ones(1))
    works = [dist.broadcast(torch.ones(1000), src=0, async_op=True) for _ in range(3)]
    works[-1].wait()
    assert works[0].get_future_result().wait() == 0
    world()._wait_for_pending_works()
    # The hook may see operations that run at the same time in any order.
    assert [str(info.op_type).split(".")[-1] for info in seen] == ["ALLREDUCE", *["BROADCAST"] * 3]
    assert all(info.active_duration >= timedelta(0) and info.time_finished >= info.time_started for info in seen)
    assert sorted(info.seq for info in seen) == list(range(seen[0].seq, seen[0].seq + 4))
    assert all(work._get_duration() >= 0 for work in works if work.is_completed())


def profiled(rank: int) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        for wait in (False, True):
            work = dist.all_reduce(torch.ones(3, 5), async_op=wait)
            if work is not None:
                work.wait()
        dist.all_gather([torch.empty(2)], torch.ones(2))
    events = [(event.name, event.input_shapes) for event in profile.events() if event.name.startswith("muster:")]
    assert events.count(("muster:all_reduce", [[3, 5]])) == 2, events
    assert all(event.is_async for event in profile.events() if event.name.startswith("muster:"))
    assert ("muster:all_gather", [[2]]) in events


def direct_collectives(rank: int) -> None:
    with pytest.warns(DeprecationWarning, match=r"use muster\.group"):
        group = muster.Group.from_process_group()
    group = muster.group()
    assert (group.rank, group.size, group.transport) == (rank, 3, muster.transport())
    data = torch.full((4,), float(rank))
    assert group.all_reduce(data) is None
    assert data.tolist() == [3.0] * 4
    group.all_reduce(data, "max")
    group.all_reduce(data, op=dist.ReduceOp.AVG)
    group.all_reduce(data, op=dist._make_nccl_premul_sum(0.5), timeout=60)
    assert data.tolist() == [4.5] * 4
    data = torch.full((4, 2), complex(0, rank + 1)).conj()[:, 0]
    group.all_reduce(data)
    assert data.tolist() == [complex(0, -6)] * 4
    data = torch.full((4,), float(rank))
    group.broadcast(data, 2)
    assert data.tolist() == [2.0] * 4
    group.reduce(data, root=1, op="product")
    assert data.tolist() == [8.0 if rank == 1 else 2.0] * 4
    output = torch.empty(6)
    work = group.all_gather_into_tensor(output, torch.full((2,), float(rank)), async_op=True)
    assert isinstance(work, dist.Work)
    work.wait()
    assert output.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    part = torch.empty(2)
    group.reduce_scatter(part, output)
    assert part.tolist() == [3.0 * rank] * 2
    exchanged = torch.empty(3)
    group.all_to_all_single(exchanged, torch.arange(3.0) + 10 * rank)
    assert exchanged.tolist() == [rank, rank + 10.0, rank + 20.0]
    group.all_to_all_single(exchanged, torch.arange(3.0) + 10 * rank, [1, 1, 1], [1, 1, 1])
    assert exchanged.tolist() == [rank, rank + 10.0, rank + 20.0]
    group.barrier()
    wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (TypeError, "needs the argument tensor", (), {}),
        (TypeError, "at most 4", (data,) * 5, {}),
        (TypeError, "no argument root", (data,), {"root": 1}),
        (TypeError, "twice", (data, "sum"), {"op": "sum"}),
        (TypeError, "expected a tensor, got list", ([1.0],), {}),
        (ValueError, "not a reduce operation", (data, "mean of all"), {}),
        (ValueError, "must be positive", (data,), {"timeout": -1}),
        (ValueError, "must be positive", (data,), {"timeout": timedelta(seconds=-1)}),
        (NotImplementedError, "on meta", (torch.ones(1, device="meta"),), {}),
        (NotImplementedError, "SparseCsr", (torch.eye(2).to_sparse_csr(),), {}),
    ]
    for kind, message, arguments, named in wrong:
        with pytest.raises(kind, match=message):
            group.all_reduce(*arguments, **named)
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(TypeError, match='CPU backend is "muster", not "gloo"'):
        muster.group(gloo)
    with pytest.raises(TypeError, match=r"expected a process group, .*, not a muster\.Group"):
        muster.trace("trace.json", group)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected a process group, .*, not 'all'"):
        muster.group("all")  # type: ignore[arg-type]
    only_first = dist.new_group([0])
    if rank > 0:
        with pytest.raises(ValueError, match="this rank is not in the process group"):
            muster.group(only_first)
    assert group.empty(2, 3).shape == group.empty((2, 3)).shape == (2, 3)
    group.barrier(timeout=timedelta(seconds=60))
    muster.monitored_barrier(timeout=60)
    group.abort()
    with pytest.raises(muster.AbortedError):
        group.barrier()


def direct_messages(rank: int) -> None:
    group: Any = muster.group()
    if rank == 0:
        group.send(torch.arange(3), 1)
        group.send(torch.arange(3), dst=1, tag=7, async_op=True).wait()
        with pytest.warns(DeprecationWarning, match="the argument to is now called dst"):
            group.send(torch.arange(3), to=1)
    elif rank == 1:
        received = torch.empty(3, dtype=torch.int64)
        assert group.recv(received, tag=7) == 0
        assert group.recv(received, src=0) == 0
        assert received.tolist() == [0, 1, 2]
        with pytest.warns(DeprecationWarning, match="the argument source is now called src"):
            assert group.recv(received, source=0) == 0
        with pytest.warns(DeprecationWarning, match="renamed to all_gather_into_tensor"), pytest.raises(TypeError):
            group.all_gather_into()
    group.barrier()


def allocated(rank: int) -> None:
    assert backend().supports_tensor_alloc(torch.device("cpu"))
    data = backend().allocate_tensor(300_000, dtype=torch.float32, device=torch.device("cpu"))
    data.fill_(rank)
    dist.all_reduce(data)
    assert data.unique().tolist() == [3.0]
    half = muster.group().empty(1000, 3, dtype=torch.bfloat16)
    assert (half.shape, half.dtype) == (torch.Size([1000, 3]), torch.bfloat16)
    half.fill_(1)
    output = muster.group().empty(3000, 3, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(output, half)
    assert output.eq(1).all()
    assert backend().allocate_tensor(0, dtype=torch.int8, device=torch.device("cpu")).numel() == 0
    with pytest.raises(ValueError, match="got device meta"):
        backend().allocate_tensor(1, dtype=torch.int8, device=torch.device("meta"))
    dist.destroy_process_group()
    assert data.sum().item() == 900_000, "tensors outlive the group"
    data.fill_(5)


def groups_in_threads(rank: int) -> None:
    """Each thread uses a group of its own. Some groups have all ranks."""
    groups = [dist.new_group([0, 1, 2] if number % 2 == 0 else [0, 2]) for number in range(4)]
    wrong: list[str] = []

    def work(number: int) -> None:
        group = groups[number]
        size = dist.get_world_size(group)
        expected = sum([0, 1, 2] if size == 3 else [0, 2])
        for round_ in range(100):
            data = torch.full((1 + 700 * (round_ % 5),), float(rank + number))
            handle = dist.all_reduce(data, group=group, async_op=round_ % 2 == 1)
            if handle is not None:
                handle.wait()
            if data.unique().tolist() != [float(expected + size * number)]:
                wrong.append(f"group {number}, round {round_}: {data}")

    mine = [number for number, group in enumerate(groups) if group is not dist.GroupMember.NON_GROUP_MEMBER]
    threads = [threading.Thread(target=work, args=(number,)) for number in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    dist.barrier()


def drop_backend(rank: int) -> None:
    options: Any = SimpleNamespace(
        store=c10d._get_default_store(),
        group_rank=rank,
        group_size=3,
        timeout=timedelta(seconds=60),
        group_id="dropped",
        global_ranks_in_group=[],
    )
    own: Any = _backend.create(options)
    own.allreduce([torch.ones(1)]).wait()
    if rank == 1:
        del own
    else:
        with pytest.raises(muster.Error, match=r"rank 1 .* has left the group"):
            own.allreduce([torch.ones(1)]).wait()
    dist.barrier()


def end_early(rank: int, folder: Path, end_of_rank_1: Connection) -> None:
    """Ends without destroying the group. Rank 1, which only sends, ends first. Rank 0 gathers later: messages take
    the time in which rank 2 notices the end of rank 1.
    """
    dist.init_process_group("muster", store=dist.FileStore(str(folder / "store"), 3), rank=rank, world_size=3)
    received = [torch.empty(1) for _ in range(3)] if rank == 2 else None
    own = torch.full((1,), float(rank))
    if rank == 0:
        assert end_of_rank_1.poll(60)
    gather = dist.gather(own, received, dst=2, async_op=True) if rank != 0 else None
    if rank != 1:
        for _ in range(1000):
            dist.send(own, dst=2 - rank)
            dist.recv(torch.empty(1), src=2 - rank)
    if gather is None:
        dist.gather(own, dst=2)
    else:
        gather.wait()
    if received is not None:
        (folder / "received").write_text(repr(torch.cat(received).tolist()))


@pytest.mark.parametrize(
    "body",
    [
        *(
            split_groups,
            monitored,
            make_subgroups,
            timeouts,
            name_the_mismatch,
            direct_collectives,
            direct_messages,
            allocated,
            drop_backend,
        ),
        groups_in_threads,
    ],
)
def test_three_ranks(body: Any) -> None:
    run_ranks(3, body)


def test_a_child_that_ends_leaves_its_groups(tmp_path: Path) -> None:
    reading, writing = forks.CONTEXT.Pipe(duplex=False)
    ends = [reading, writing, reading]
    ranks = [forks.Process(target=end_early, args=(rank, tmp_path, end)) for rank, end in enumerate(ends)]
    for rank in ranks:
        rank.start()
    writing.close()  # rank 1 holds the only other copy
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    assert (tmp_path / "received").read_text() == "[0.0, 1.0, 2.0]"


def test_profilers_show_its_operations_with_their_shapes() -> None:
    run_ranks(1, profiled)


@pytest.mark.parametrize("transport", ["shm,tcp", "tcp"])
def test_error_types_match_c10d(transport: str) -> None:
    run_ranks(3, error_types, lost=(1,), env={"MUSTER_TRANSPORT": transport})


def test_survivors_shrink_a_group_whose_rank_died() -> None:
    run_ranks(3, shrink_group, lost=(1,))


def test_torch_patches_apply_once_and_only_to_muster() -> None:
    from muster import _autoload

    before = dist.monitored_barrier
    _autoload.load()
    assert dist.monitored_barrier is before
    assert c10d.monitored_barrier is before
