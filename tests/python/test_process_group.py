"""Tests muster.Options, and muster.process_group(): groups without init_process_group()."""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, run_ranks

import muster


def sum_of(group: Any, rank: int) -> float:
    data = torch.tensor([float(rank + 1)])
    group.allreduce([data]).wait()
    return data.item()


def tcp_connections() -> int:
    """The connected TCP sockets of this process."""
    own = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(f"socket:[{row[9]}]" in own and row[3] == "01" for row in rows)


def each_option_acts(rank: int) -> None:
    assert muster.transport() == "shm"
    for options, transport in [
        (muster.Options(), "shm"),
        (muster.Options(transport="unix"), "unix"),
        (muster.Options(transport="unix,tcp"), "unix"),
        (muster.Options(label=f"host {rank}", interface="lo"), "tcp"),
    ]:
        group: Any = dist.new_group(pg_options=options)
        assert muster.transport(group) == transport, options
        assert sum_of(group, rank) == 3
    for streams in (1, 3):
        before = tcp_connections()
        options = muster.Options(transport="tcp", interface="127.0.0.1", streams=streams)
        group = dist.new_group(pg_options=options)
        assert sum_of(group, rank) == 3
        assert tcp_connections() == before + streams
    timed = dist.new_group(pg_options=muster.Options(timeout=77))
    assert muster.group(timed).timeout == 77
    same = dist.new_group(timeout=timedelta(seconds=77), pg_options=muster.Options(timeout=77))
    assert muster.group(same).timeout == 77


def wrong_options(rank: int) -> None:
    with pytest.raises(ValueError, match=r"pg_options\.timeout is 0:01:17 but timeout= is 0:00:05: pass only one"):
        dist.new_group(timeout=timedelta(seconds=5), pg_options=muster.Options(timeout=77))
    with pytest.raises(ValueError, match="nowhere0"):
        dist.new_group(pg_options=muster.Options(transport="tcp", interface="nowhere0"))
    with pytest.raises(
        TypeError, match=re.escape("takes pg_options=muster.Options(...), but was given {'streams': 2}")
    ):
        dist.new_group(pg_options={"streams": 2})
    dist.barrier()


def test_each_option_of_a_group_acts(ranks: RankPool) -> None:
    ranks.run(each_option_acts)


def test_wrong_options_of_a_group_are_named(ranks: RankPool) -> None:
    ranks.run(wrong_options)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"timeout": 0}, "timeout must be > 0, got 0:00:00"),
        ({"transport": "shm,ib"}, "transport has 'ib': use some of shm, unix and tcp"),
        ({"transport": ""}, "transport has ''"),
        ({"streams": 17}, "streams must be a number from 1 to 16, got 17"),
        ({"streams": "2"}, "streams must be a number from 1 to 16, got '2'"),
        ({"interface": ""}, "interface is empty"),
        ({"label": ""}, "label is empty"),
    ],
)
def test_options_that_cannot_be_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        muster.Options(**given)


def options_before_variables(rank: int) -> list[str]:
    groups = [dist.new_group(pg_options=options) for options in (None, muster.Options(transport="shm"))]
    return [muster.transport(), *map(muster.transport, groups)]


def test_options_come_before_the_environment() -> None:
    assert run_ranks(2, options_before_variables, env={"MUSTER_TRANSPORT": "unix"}) == [["unix", "unix", "shm"]] * 2


def replace_a_rank(rank: int, path: str) -> str | None:
    """Ranks 0 and 1 form a group, 1 is killed, and 2 takes its place. Then 0 and 2 form a third group."""
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(path, 3)
    report = None
    if rank < 2:
        group: Any = muster.process_group(dist.PrefixStore("first", store), rank, 2, timeout=60)
        assert sum_of(group, rank) == 3
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(muster.PeerLostError) as caught:
            for _ in range(1000):
                group.allreduce([torch.ones(100_000)]).wait()
        assert caught.value.rank == 1
        group.shutdown()
        report = str(caught.value)
    place = rank // 2
    for name, size in [("second", 2), ("third", 2), ("alone", 1)]:
        prefix = name if size == 2 else f"{name}/{rank}"
        group = muster.process_group(dist.PrefixStore(prefix, store), place % size, size, timeout=60)
        data = torch.full((3,), float(place + 1))
        dist.all_reduce(data, group=group)
        assert data.tolist() == [3.0 if size == 2 else place + 1.0] * 3
        assert (group.rank(), group.size()) == (place % size, size)
        if name == "second":
            muster.group(group).barrier()
            group.abort()
            with pytest.raises(muster.AbortedError):
                group.allreduce([data]).wait()
    return report


def test_a_manager_replaces_a_rank_that_died(tmp_path: Path) -> None:
    first, _, third = run_ranks(3, replace_a_rank, f"{tmp_path}/store", lost=(1,))
    assert "rank 1" in first
    assert third is None


def with_options_and_alone(rank: int, path: str) -> None:
    store = dist.FileStore(path, 2)
    options = muster.Options(transport="unix", timeout=50)
    group = muster.process_group(dist.PrefixStore("unix", store), rank, 2, options=options)
    assert muster.transport(group) == "unix"
    assert muster.group(group).timeout == 50
    assert sum_of(group, rank) == 3
    with pytest.raises(ValueError, match="rank 2 is out of range for world size 2"):
        muster.process_group(store, 2, 2)
    with pytest.raises(TimeoutError, match="missing: 1"):
        muster.process_group(dist.PrefixStore(f"alone/{rank}", store), 0, 2, timeout=0.3)
    assert sum_of(group, rank) == 3


def test_a_group_of_a_manager_has_options_and_a_timeout(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(with_options_and_alone, f"{tmp_path}/store")
