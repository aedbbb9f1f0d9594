"""Tests MUSTER_REPLACE=gloo: programs ask for Gloo and get muster."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import Launch
from ranks import run_ranks
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from muster import _replace, _requirements

REPLACE = {"MUSTER_REPLACE": "gloo"}


def backend_name(group: Any = None) -> str:
    return str((group or c10d._get_default_group())._get_backend(torch.device("cpu")).name())


def sum_of_ones(group: Any = None) -> float:
    data = torch.ones(5)
    dist.all_reduce(data, group=group)
    return data.unique().item()


def replaced(rank: int) -> None:
    assert (dist.get_backend(), backend_name(), sum_of_ones()) == ("gloo", "muster", 3)
    group: Any = dist.group.WORLD
    assert (group.name(), group._get_backend_name()) == ("gloo", "gloo")
    assert isinstance(
        group._get_backend(torch.device("cpu")).create_device(interface="lo"), c10d.ProcessGroupGloo.Device
    )
    for backend in ("gloo", None, "cpu:gloo"):
        part = dist.new_group([0, 2], backend=backend)
        if rank == 1:
            assert part is dist.GroupMember.NON_GROUP_MEMBER
        else:
            assert "gloo" in dist.get_backend(part)
            assert (backend_name(part), sum_of_ones(part)) == ("muster", 2)
    mesh = init_device_mesh("cpu", (3,))
    assert sum_of_ones(mesh.get_group()) == 3
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    c10d._set_pg_timeout(timedelta(seconds=50), c10d._get_default_group())
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.0, 1.0]]
    objects: list[Any] = [None] * 3
    dist.all_gather_object(objects, rank)
    assert objects == [0, 1, 2]


def use_again(rank: int) -> None:
    """The same store and the same group names."""
    store = c10d._get_default_store()
    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        assert (backend_name(), sum_of_ones()) == ("muster", 3)


def fall_back(rank: int) -> str:
    store = c10d._get_default_store()
    dist.destroy_process_group()
    if rank == 1:
        _requirements.problem = lambda: "muster is not built"
    lines: list[str] = []
    _replace._print = lines.append  # type: ignore[assignment]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    assert (dist.get_backend(), backend_name(), sum_of_ones()) == ("gloo", "gloo", 3)
    group: Any = dist.group.WORLD
    assert group.name() == "gloo"
    return "".join(lines)


def undefined(rank: int) -> None:
    """`backend` is not given: torch's default for CPU tensors."""
    store = c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(store=store, rank=rank, world_size=2)
    assert (backend_name(), sum_of_ones()) == ("muster", 2)


def with_accelerator(rank: int) -> None:
    """One rank has an accelerator. So Gloo serves all its devices but the CPU, as torch's Gloo does."""
    store = c10d._get_default_store()
    dist.destroy_process_group()
    if rank == 1:
        torch.accelerator.is_available = lambda: True
    for backend in ("gloo", "cpu:gloo,cuda:gloo"):
        own_store = dist.PrefixStore(backend, store)  # Gloo takes a store once
        dist.init_process_group(backend, store=own_store, rank=rank, world_size=2)
        group: Any = dist.group.WORLD
        assert (backend_name(), sum_of_ones()) == ("muster", 2)
        assert group._get_backend(torch.device("cuda")).name() == "gloo"
        assert dist.get_backend_config() == "cpu:gloo,cuda:gloo" or backend == "gloo"
        dist.destroy_process_group()


@pytest.mark.parametrize("body", [replaced, use_again])
def test_groups_that_ask_for_gloo_get_muster(body: Callable[[int], None]) -> None:
    run_ranks(3, body, backend="gloo", env=REPLACE)


def test_the_default_backend_is_replaced() -> None:
    run_ranks(2, undefined, backend="gloo", env=REPLACE)


def test_devices_keep_gloo() -> None:
    run_ranks(2, with_accelerator, backend="gloo", env=REPLACE)


def test_all_ranks_fall_back_to_gloo_and_rank_0_says_why() -> None:
    printed = run_ranks(3, fall_back, backend="gloo", env=REPLACE)
    assert printed == ["a process group uses Gloo despite MUSTER_REPLACE: rank 1: muster is not built", "", ""]


def test_other_backends_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_REPLACE", "nccl")
    with pytest.raises(ValueError, match="MUSTER_REPLACE='nccl': the only backend that muster can replace is gloo"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_the_launcher_replaces_gloo(launch: Launch, script: Callable[[str], Path]) -> None:
    text = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(dist.distributed_c10d._get_default_group()._get_backend(torch.device('cpu')).name())\n"
        "dist.destroy_process_group()\n"
    )
    job = launch("--replace", "gloo", "--nproc-per-node=2", script(text))
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == ["[rank 0] muster", "[rank 1] muster"]
    assert job.err.count('muster: process groups that ask for "gloo" use muster (MUSTER_REPLACE)') == 1


def test_the_launcher_names_what_it_can_replace(launch: Launch, script: Callable[[str], Path]) -> None:
    job = launch("--replace", "nccl", script(""))
    assert job.finish() == 2
    assert "--replace takes gloo, not 'nccl'" in job.err
