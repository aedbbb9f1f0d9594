"""Tests single options of muster.nn.DistributedDataParallel. test_nn_ddp.py draws combinations of options."""

from __future__ import annotations

import contextlib
import copy
import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from muster.nn import DistributedDataParallel
from ranks import RankPool
from test_nn_ddp import CLASSES, PER_RANK, WIDTH, Branches, batch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

import muster

KNOWN = inspect.signature(nn.parallel.DistributedDataParallel).parameters  # torch 2.11 has fewer


class HalfDelayed(nn.Module):
    """Has a frozen layer between two trained layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fixed, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fixed(torch.tanh(self.first(x))))


def delay_all_reduce(rank: int, layers: list[str]) -> None:
    """DDP averages the gradients of `layers` together when the input's gradient, the last one, has arrived. It arrives
    late at rank 1."""
    torch.manual_seed(4)
    module = HalfDelayed()
    reference = copy.deepcopy(module)
    delayed = [(name, each) for name, each in module.named_parameters() if name.split(".")[0] in layers]
    leaf = nn.Parameter(torch.empty(PER_RANK, WIDTH))
    step = 0

    def delay_until_returned(gradient: Tensor) -> None:
        with contextlib.suppress(RuntimeError):  # times out, because rank 0 waits for this gradient
            _get_default_store().wait([f"{layers} {step}"], timedelta(seconds=0.3))

    if rank == 1:
        leaf.register_hook(delay_until_returned)
    model = DistributedDataParallel(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=leaf)
    for step in range(3):
        x, y = batch(step, 2)
        part = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
        model.zero_grad()
        leaf.data.copy_(x[part])
        F.cross_entropy(model(leaf * 1), y[part]).backward()
        if rank == 0:
            _get_default_store().set(f"{layers} {step}", "returned")
        reference.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        for (name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("layers", [["first"], ["first", "last"]])
def test_backward_waits_for_delayed_gradients(ranks: RankPool, layers: list[str]) -> None:
    ranks.run(delay_all_reduce, layers)


def delay_different_parameters(rank: int) -> None:
    module = HalfDelayed()
    module.first.weight = nn.Parameter(torch.zeros(8, 6) if rank == 0 else torch.zeros(6, 8))
    delayed = [("first.weight", module.first.weight)]
    with pytest.raises(muster.MismatchError, match=r"rank 1 has first.weight: Float\[6, 8\], rank 0 has .*\[8, 6\]"):
        DistributedDataParallel(
            module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.first.weight
        )


def test_different_delayed_parameters_are_reported(ranks: RankPool) -> None:
    ranks.run(delay_different_parameters)


def start_without_sync(rank: int) -> None:
    group = muster.group(dist.group.WORLD)
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, rank)
    before = group.sequence
    model = DistributedDataParallel(module, init_sync=False)
    assert group.sequence == before, "nothing is compared or sent"
    assert module.weight.tolist() == [[rank, rank]]
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert module.weight.grad is not None and module.weight.grad.tolist() == [[1.5, 1.5]], "averaged all the same"


def test_init_sync_can_be_disabled(ranks: RankPool) -> None:
    ranks.run(start_without_sync)


def buffers_seen(rank: int, options: dict[str, bool]) -> list[float]:
    """A buffer's values: after construction, within forward, and, changed, within a second forward."""
    module = nn.Linear(2, 1)
    module.register_buffer("mine", torch.tensor(float(rank)))
    seen: list[float] = []
    module.register_forward_pre_hook(lambda module, inputs: seen.append(float(module.get_buffer("mine"))))
    model = DistributedDataParallel(module, **options)
    seen.append(float(module.get_buffer("mine")))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        module.get_buffer("mine").fill_(10.0 + rank)
    return seen


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 0, 10]),
        ({"forward_sync_buffers": True}, [0, 0, 10]),
        ({"forward_sync_buffers": False}, [0, 0, 11]),
        ({"broadcast_buffers": False}, [1, 1, 11]),
    ],
)
def test_buffers_are_broadcast_when_configured(
    ranks: RankPool, options: dict[str, bool], expected: list[float]
) -> None:
    if not options.keys() <= KNOWN.keys():
        pytest.skip("this torch has no such option")
    assert ranks.run(buffers_seen, options) == [[0, 0, 10], expected]


def use_device_mesh(rank: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2,))
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False), device_mesh=mesh)
    assert model.process_group == mesh.get_group()
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh"):
        DistributedDataParallel(nn.Linear(2, 1), process_group=dist.group.WORLD, device_mesh=mesh)


def test_device_mesh_can_give_the_group(ranks: RankPool) -> None:
    ranks.run(use_device_mesh)


def skip_unused_buckets(rank: int, skip: bool) -> int:
    """The number of collectives in a backward of a model that uses one of its three branches."""
    torch.manual_seed(4)
    reference = Branches()
    options: dict[str, Any] = {"skip_all_reduce_unused_params": True} if skip else {}
    model = DistributedDataParallel(
        copy.deepcopy(reference), bucket_cap_mb=1e-6, find_unused_parameters=True, **options
    )
    x, y = batch(1, 2)
    part = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
    loss = F.cross_entropy(model(x[part]), y[part])
    group = muster.group(dist.group.WORLD)
    before = group.sequence
    loss.backward()
    F.cross_entropy(reference(x), y).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    return group.sequence - before


@pytest.mark.skipif("skip_all_reduce_unused_params" not in KNOWN, reason="this torch has no such option")
def test_buckets_of_unused_parameters_can_be_skipped(ranks: RankPool) -> None:
    buckets, used_map, unused = 8, 1, 4  # each parameter has its own bucket
    assert ranks.run(skip_unused_buckets, False) == [buckets + used_map] * 2
    assert ranks.run(skip_unused_buckets, True) == [buckets + used_map - unused] * 2
