"""Tests steps of muster.nn.DistributedDataParallel in which a communication hook or a layer fails, and later steps."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from muster.nn import DistributedDataParallel
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

import muster


def failing_at_one_rank(rank: int) -> None:
    """Each parameter has its own bucket, so all steps make the same collectives, and shapes do not tell steps apart."""
    group = dist.new_group()
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), process_group=group, bucket_cap_mb=0
    )
    failing = False

    def average(state, bucket):  # type: ignore[no-untyped-def] # torch would look at annotations
        if failing:
            raise OverflowError("no more")
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 2)

    def step() -> None:
        model.zero_grad()
        model(torch.full((1, 4), rank + 1.0)).sum().backward()

    model.register_comm_hook(None, average)
    step()
    if rank == 1:
        failing = True
        with pytest.raises(OverflowError, match="no more"):
            step()
        failing = False
    for _ in range(2):
        with pytest.raises(muster.MismatchError):
            step()
    dist.destroy_process_group(group)


def test_a_hook_that_fails_at_one_rank_fails_the_step_at_all(ranks: RankPool) -> None:
    ranks.run(failing_at_one_rank)


def failing_at_all_ranks(rank: int) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    expected = copy.deepcopy(module)
    sum(expected(torch.full((1, 4), each + 1.0)).sum() / 2 for each in range(2)).backward()
    model = DistributedDataParallel(module, bucket_cap_mb=0)
    failing: list[str] = []

    def average(state, bucket):  # type: ignore[no-untyped-def] # torch would look at annotations
        if failing == ["call"] and bucket.index() == 2:
            raise OverflowError("no more")
        work = dist.all_reduce(bucket.buffer(), async_op=True)

        def halve(future):  # type: ignore[no-untyped-def]
            if failing == ["callback"] and bucket.index() == 2:
                raise OverflowError("no more")
            return future.value()[0] / 2

        return work.get_future().then(halve)

    model.register_comm_hook(None, average)
    for way in ("call", "callback"):
        failing.append(way)
        model.zero_grad()
        with pytest.raises((OverflowError, RuntimeError), match="no more"):
            model(torch.full((1, 4), rank + 7.0)).sum().backward()
        failing.clear()
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 4), rank + 1.0)).sum().backward()
            for ours, theirs in zip(module.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)


def test_step_after_a_failed_hook_is_correct(ranks: RankPool) -> None:
    ranks.run(failing_at_all_ranks)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, raises: bool) -> Tensor:
        ctx.raises = raises
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.raises:
            raise OverflowError("no more")
        return gradient, None


raises_in_backward: Any = RaisesInBackward.apply


class FailingLayer(nn.Module):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        return raises_in_backward(x, self.fails)


def layer_failing_at_one_rank(rank: int, position: int) -> None:
    """At position 2, backward at rank 1 fails before the first gradient. At position 1, two buckets are reduced."""
    group, layer = dist.new_group(), FailingLayer()
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers.insert(position, layer)
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=group, bucket_cap_mb=0)

    def step() -> None:
        model.zero_grad()
        model(torch.full((1, 4), rank + 1.0)).sum().backward()

    for _ in range(2):  # the second step rebuilds the buckets
        step()
    dist.barrier()  # until here, ranks may be late without a timeout
    layer.fails = rank == 1
    if rank == 0:
        c10d._set_pg_timeout(timedelta(seconds=1), group)
        with pytest.raises(muster.TimeoutError, match="rank 1"):
            step()
    else:
        with pytest.raises(OverflowError, match="no more"):
            step()
    dist.barrier()  # otherwise rank 1 could begin the next step, or leave the group, while rank 0 still waits
    layer.fails = False
    begun = rank == 1 and position == 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Expected to have finished reduction" if begun else None) as caught:
            step()
        assert begun or isinstance(caught.value, muster.Error)
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("position", [1, 2])
def test_a_layer_that_fails_at_one_rank_fails_all_ranks(ranks: RankPool, position: int) -> None:
    ranks.run(layer_failing_at_one_rank, position)


def hook_with_a_wrong_size(rank: int) -> None:
    end: int | None = -1

    def hook(state, bucket):  # type: ignore[no-untyped-def] # torch would look at annotations
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer()[:end])
        return future

    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, hook)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a communication hook returned 5 elements for a bucket of 6"):
            model(torch.ones(1, 2)).sum().backward()
    end = None
    model.zero_grad()
    model(torch.full((1, 2), 3.0)).sum().backward()
    torch.testing.assert_close(model.module.weight.grad, torch.full((2, 2), 3.0))


def test_a_hook_result_of_a_wrong_size_is_refused(ranks: RankPool) -> None:
    ranks.run(hook_with_a_wrong_size)


def hook_without_result(rank: int) -> None:
    hasty = dist.new_group()
    model = DistributedDataParallel(nn.Linear(2, 1), process_group=hasty)
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    c10d._set_pg_timeout(timedelta(seconds=0.2), hasty)
    with pytest.raises(muster.Error, match=r"future of bucket 0 is not complete after 0\.2 s"):
        model(torch.ones(1, 2)).sum().backward()


def test_an_incomplete_hook_future_times_out(ranks: RankPool) -> None:
    ranks.run(hook_without_result)
