"""Tests what c10d::Backend has from torch 2.14 on: names that end in _single, and windows. test_reconfigure.py has the
rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.distributed import distributed_c10d as c10d

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
pytestmark = pytest.mark.skipif(RELEASE < (2, 14), reason=f"torch {torch.__version__} has none of it")
CPU = torch.device("cpu")
SIZE = 3


def values(seed: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 10 * seed


def single_names(rank: int) -> None:
    group: Any = c10d._get_default_group()
    theirs = [values(each, 6) for each in range(SIZE)]
    total = torch.stack(theirs).sum(0)
    for target in (group, group._get_backend(CPU)):
        output = torch.empty(6 * SIZE)
        target.all_gather_single(output, theirs[rank]).wait()
        assert torch.equal(output, torch.cat(theirs))

        outputs = [torch.empty(6 * SIZE), torch.empty(6 * SIZE)]
        target.all_gather_single_coalesced(outputs, [theirs[rank], -theirs[rank]]).wait()
        assert torch.equal(outputs[0], torch.cat(theirs)) and torch.equal(outputs[1], -outputs[0])

        options = c10d.GatherOptions()
        options.rootRank = 1
        output = torch.zeros(6 * SIZE if rank == 1 else 0)
        target.gather_single(output, theirs[rank], options).wait()
        assert rank != 1 or torch.equal(output, torch.cat(theirs))

        output, part = torch.empty(2), slice(2 * rank, 2 * rank + 2)
        target.reduce_scatter_single(output, theirs[rank].clone(), c10d.ReduceScatterOptions()).wait()
        assert torch.equal(output, total[part])

        outputs = [torch.empty(2), torch.empty(2)]
        inputs = [theirs[rank].clone(), -theirs[rank]]
        target.reduce_scatter_single_coalesced(outputs, inputs, c10d.ReduceScatterOptions()).wait()
        assert torch.equal(outputs[0], total[part]) and torch.equal(outputs[1], -outputs[0])

        output = torch.empty(6)
        target.all_to_all_single(output, theirs[rank], [], []).wait()
        assert torch.equal(output, torch.cat([each[part] for each in theirs]))


def says_what_is_missing(rank: int) -> None:
    group: Any = c10d._get_default_group()
    for target in (group, group._get_backend(CPU)):
        with pytest.raises(RuntimeError, match="Backend muster does not support new_window"):
            target.new_window()


@pytest.mark.parametrize("body", [single_names, says_what_is_missing])
def test_three_ranks(body: Callable[[int], None]) -> None:
    run_ranks(SIZE, body)
