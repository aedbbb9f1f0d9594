"""Tests that stock DistributedDataParallel over muster trains as one process on the whole batch does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

State = dict[str, "np.ndarray"]  # arrays, because tensors would be sent as shared memory of a process that has ended
STEPS = 4
PER_RANK = 3


class Net(nn.Module):
    """Has several buckets, a batch norm (buffers), and a branch that may be unused."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.used, self.spare = nn.Linear(32, 4), nn.Linear(32, 4)
        self.unused = unused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        return self.used(hidden) if self.unused else self.used(hidden) + self.spare(hidden)


def batch(step: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    count = ranks * PER_RANK
    return torch.randn(count, 8, generator=generator), torch.randn(count, 4, generator=generator)


def train(model: nn.Module, ranks: int, part: slice) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        x, y = batch(step, ranks)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[part]), y[part]).backward()
        optimizer.step()


def make(unused: bool) -> Net:
    torch.manual_seed(7)
    net = Net(unused)
    net.eval()  # batch norm uses its stored statistics: those of a part differ from those of the batch
    return net


def train_distributed(rank: int, size: int, options: dict[str, Any], unused: bool) -> State:
    torch.set_num_threads(1)
    net = make(unused)
    if rank > 0:
        for parameter in net.parameters():  # DDP must use rank 0's parameters
            nn.init.zeros_(parameter)
    model = DistributedDataParallel(net, bucket_cap_mb=0.005, **options)
    train(model, size, slice(rank * PER_RANK, (rank + 1) * PER_RANK))
    return {name: value.detach().numpy() for name, value in net.state_dict().items()}


def train_one_process(rank: int, size: int, unused: bool) -> State:
    torch.set_num_threads(1)
    net = make(unused)
    train(net, size, slice(None))
    return {name: value.detach().numpy() for name, value in net.state_dict().items()}


@pytest.mark.parametrize(
    ("size", "options", "unused"),
    [
        (2, {}, False),
        (4, {}, False),
        (2, {"gradient_as_bucket_view": True}, False),
        (2, {"static_graph": True}, False),
        (2, {"find_unused_parameters": True}, True),
    ],
)
def test_ddp_equals_one_process_on_the_whole_batch(size: int, options: dict[str, Any], unused: bool) -> None:
    (expected,) = run_ranks(1, train_one_process, size, unused)
    states = run_ranks(size, train_distributed, size, options, unused)
    for state in states:
        for name, value in state.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
            np.testing.assert_array_equal(value, states[0][name], err_msg=f"{name} differs between ranks")


def accumulate_gradients(rank: int) -> float:
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), float(rank + 1))
    with model.no_sync():
        model(x).sum().backward()
    assert model.module.weight.grad is not None
    assert model.module.weight.grad.unique().tolist() == [rank + 1.0]
    model(x).sum().backward()
    return float(model.module.weight.grad[0, 0])


def test_ddp_no_sync_accumulates_locally() -> None:
    assert run_ranks(2, accumulate_gradients) == [3.0, 3.0]


def chain_hooks(rank: int) -> list[float]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)  # adds a Python callback to the Work's future
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 3), float(rank))).sum().backward()
    assert model.module.weight.grad is not None
    return model.module.weight.grad.flatten().tolist()


def test_ddp_hooks_chain_on_its_futures() -> None:
    assert run_ranks(2, chain_hooks) == [[0.5] * 3] * 2


def broadcast_buffers(rank: int) -> float:
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.BatchNorm1d(2))
    for _ in range(2):
        model(torch.randn(4, 2)).sum().backward()
    model(torch.randn(4, 2))  # forward first broadcasts rank 0's buffers
    dist.barrier()
    model.eval()
    return float(model.module.num_batches_tracked)


def test_ddp_broadcasts_buffers() -> None:
    assert run_ranks(2, broadcast_buffers) == [3.0, 3.0]


def wrap_different_models(rank: int) -> str:
    try:
        DistributedDataParallel(nn.Linear(2 + rank, 1))
    except RuntimeError as error:
        return str(error)
    return ""


def test_ddp_detects_models_that_differ() -> None:
    assert "appears not to match" in run_ranks(2, wrap_different_models)[1]
