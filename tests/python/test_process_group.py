"""Tests muster.Options: the options of one process group."""

from __future__ import annotations

import re
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
    with pytest.raises(ValueError, match="timeout of 0:01:17 and the argument timeout= says 0:00:05: give one"):
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
