"""Tests torch.distributed.split_group() on the CPU, and the sequence numbers of process groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, run_ranks

import muster


def sum_in(group: Any, value: float) -> float:
    data = torch.tensor([value])
    dist.all_reduce(data, group=group)
    return data.item()


def split_four(rank: int, backend: str) -> None:
    halves: Any = dist.split_group(split_ranks=[[2, 0], [1, 3]], timeout=timedelta(seconds=60))
    assert dist.get_process_group_ranks(halves) == [[0, 2], [1, 3]][rank % 2]
    assert (dist.get_rank(halves), dist.get_world_size(halves)) == (rank // 2, 2)
    assert dist.get_backend(halves) == backend
    assert sum_in(halves, rank) == [2, 4][rank % 2]
    assert muster.group(halves).timeout == 60

    # Ranks of the parent are meant, and only some of them.
    parts = [dist.split_group(halves, [[1]], group_desc="a part", backend=backend) for _ in range(2)]
    assert [part is None for part in parts] == [rank < 2] * 2
    for part in filter(None, parts):
        assert dist.get_process_group_ranks(part) == [rank]
        assert part.group_desc == "a part"
        assert sum_in(part, rank) == rank
        assert muster.group(part).timeout == 60, "the parent's"
    assert len({part.group_name for part in parts if part}) == (2 if rank >= 2 else 0)

    dist.destroy_process_group(halves)
    again: Any = dist.split_group(split_ranks=[[0, 1, 2, 3]], pg_options=muster.Options(timeout=70))
    assert sum_in(again, rank) == 6
    assert muster.group(again).timeout == 70
    dist.barrier()


@pytest.mark.parametrize("backend", ["muster", "gloo"])
def test_split_group_works_on_the_cpu(backend: str) -> None:
    run_ranks(4, split_four, backend, backend=backend, env={"MUSTER_REPLACE": "gloo"})


def wrong_splits(rank: int) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "needs at least one list"),
        ({"split_ranks": [[0], []]}, "each list at least one rank"),
        ({"split_ranks": [[0, 2]]}, "rank 2 is out of range, the parent group has ranks 0 to 1"),
        ({"split_ranks": [[0], [1, 0]]}, r"a rank is listed twice in \[\[0\], \[1, 0\]\]"),
        ({"split_ranks": [[0, 1]], "backend": "gloo"}, "the parent group has the backend 'muster', not 'gloo'"),
        ({"split_ranks": [[0, 1]], "pg_options": muster.Options(transport="tcp")}, "has the transport of the group"),
        (
            {"split_ranks": [[0, 1]], "timeout": timedelta(seconds=5), "pg_options": muster.Options(timeout=6)},
            "pg_options.timeout is 0:00:06 but timeout= is 0:00:05",
        ),
    ]
    for arguments, text in cases:
        with pytest.raises(ValueError, match=text):
            dist.split_group(**arguments)
    # From 2.15 on torch's own function splits groups of Gloo.
    if torch.torch_version.TorchVersion(torch.__version__) < "2.15":
        with pytest.raises(RuntimeError, match="No device associated"):
            dist.split_group(dist.new_group(backend="gloo"), [[0, 1]])
    dist.barrier()


def test_wrong_splits_are_named(ranks: RankPool) -> None:
    ranks.run(wrong_splits)


def count_calls(rank: int) -> None:
    group: Any = dist.new_group()
    if hasattr(group, "_set_sequence_number_for_group"):  # up to torch 2.14
        group._set_sequence_number_for_group()
    before = group._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group)
    assert group._get_sequence_number_for_group() == before + 3 == muster.group(group).sequence
    gloo: Any = dist.new_group(backend="gloo")
    before = gloo._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(2), group=gloo)
    assert gloo._get_sequence_number_for_group() == before + 1, "torch's own"


def test_groups_count_their_calls(ranks: RankPool) -> None:
    ranks.run(count_calls)
