"""Options of muster.nn.DistributedDataParallel, each for itself. test_nn_ddp.py draws those that combine."""

from __future__ import annotations

import contextlib
import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from muster.nn import DistributedDataParallel
from ranks import RankPool
from test_nn_ddp import CLASSES, PER_RANK, WIDTH, batch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store


class Half(nn.Module):
    """A layer that does not learn between two that do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fixed, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fixed(torch.tanh(self.first(x))))


def delaying(rank: int, layers: list[str]) -> None:
    """Their gradients are averaged at once, when that of the input has come: the last one. Rank 1 is late with it."""
    torch.manual_seed(4)
    module = Half()
    reference = copy.deepcopy(module)
    delayed = [(name, each) for name, each in module.named_parameters() if name.split(".")[0] in layers]
    leaf = nn.Parameter(torch.empty(PER_RANK, WIDTH))
    step = 0

    def dawdle(gradient: Tensor) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 waits, too
            _get_default_store().wait([f"{layers} {step}"], timedelta(seconds=0.3))

    if rank == 1:
        leaf.register_hook(dawdle)
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
            torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("layers", [["first"], ["first", "last"]])
def test_backward_ends_when_delayed_gradients_are_averaged(ranks: RankPool, layers: list[str]) -> None:
    ranks.run(delaying, layers)
