"""Tests DistributedDataParallel's mixed_precision on the CPU: in forward and backward, or in reductions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from muster.nn import DistributedDataParallel
from ranks import RankPool
from test_nn_ddp import CLASSES, PER_RANK, WIDTH, Branches, Checkpointed, Tied, batch, digest, perceptron
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision


class Recurrent(nn.Module):
    """Its LSTM keeps a separate list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.LSTM(WIDTH // 2, 4), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x.view(2, -1, WIDTH // 2))[0].transpose(0, 1).flatten(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "branches": Branches,
    "tied": Tied,
    "recurrent": Recurrent,
}
BF16 = torch.bfloat16
EXACT = _MixedPrecision(BF16, reduce_dtype=torch.float32)
CASES: list[tuple[str, _MixedPrecision, dict[str, Any]]] = [
    *((name, EXACT, {"find_unused_parameters": name == "branches"}) for name in MODELS),
    ("perceptron", EXACT, {"gradient_as_bucket_view": False, "static_graph": True}),
    ("perceptron", _MixedPrecision(BF16), {"bucket_cap_mb": 0.001}),
    ("perceptron", _MixedPrecision(BF16, BF16), {"gradient_as_bucket_view": False}),
    ("perceptron", _MixedPrecision(torch.half), {}),
    ("perceptron", _MixedPrecision(reduce_dtype=BF16), {"bucket_cap_mb": 0.001}),
]


def low_precision_loss(model: nn.Module, dtype: torch.dtype | None, x: Tensor, y: Tensor) -> Tensor:
    """The loss of the wrapped model, computed in another way."""
    if dtype is None:
        return F.cross_entropy(model(x), y)
    low = {name: each.to(dtype) for name, each in model.named_parameters()}
    return F.cross_entropy(functional_call(model, low, x.to(dtype)), y)


def train(rank: int, name: str, config: _MixedPrecision, options: dict[str, Any]) -> str:
    torch.manual_seed(4)
    reference = MODELS[name]()
    module = copy.deepcopy(reference)
    model = DistributedDataParallel(module, mixed_precision=config, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = config.reduce_dtype == torch.float32
    for step in range(4):
        parts = [[each[PER_RANK * i :][:PER_RANK] for each in batch(step, 2)] for i in range(2)]
        reference.load_state_dict(module.state_dict())
        reference.zero_grad()
        for x, y in parts:
            if isinstance(reference, Branches):
                reference.steps = step
            (low_precision_loss(reference, config.param_dtype, x, y) / 2).backward()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        F.cross_entropy(model(parts[rank][0]), parts[rank][1]).backward()
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            assert ours.dtype == torch.float32
            if ours.grad is not None and theirs.grad is not None:
                assert ours.grad.dtype == torch.float32
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.02, atol=1e-6 if exact else 1e-3)
        optimizer.step()
    assert all(hasattr(each, "_fp_param") == (config.param_dtype is not None) for each in module.parameters())
    module(parts[0][0])  # the module itself still works as before
    return digest(module)


def test_gradients_match_low_precision_copies(ranks: RankPool) -> None:
    for case in CASES:
        assert len(set(ranks.run(train, *case))) == 1, case


def recompute_forward(rank: int) -> None:
    plain = perceptron()
    checkpointed = Checkpointed(copy.deepcopy(plain), reentrant=False)
    for module in (plain, checkpointed):
        DistributedDataParallel(module, mixed_precision=EXACT)(batch(rank, 1)[0]).sum().backward()
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_checkpoints_recompute_in_low_precision(ranks: RankPool) -> None:
    ranks.run(recompute_forward)


def accumulate_gradients(rank: int) -> None:
    torch.manual_seed(4)
    model = DistributedDataParallel(perceptron(), mixed_precision=EXACT)
    model.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook)
    reference = copy.deepcopy(model.module)
    for turn in range(3):
        for part in range(2):
            x, y = (each[PER_RANK * part :][:PER_RANK] for each in batch(turn, 2))
            (low_precision_loss(reference, BF16, x, y) / 2).backward()
        model.require_backward_grad_sync = turn == 2
        x, y = (each[PER_RANK * rank :][:PER_RANK] for each in batch(turn, 2))
        F.cross_entropy(model(x), y).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_gradients_accumulate_in_full_precision(ranks: RankPool) -> None:
    ranks.run(accumulate_gradients)


def cast_buffers(rank: int) -> None:
    config = _MixedPrecision(BF16, torch.float32, BF16)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)), mixed_precision=config)
    model(batch(0, 1)[0]).sum().backward()
    assert [each.dtype for each in model.buffers()] == [BF16, BF16, torch.int64]
    with torch.no_grad():
        assert model(batch(0, 1)[0]).dtype == BF16
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_buffers_are_cast_permanently(ranks: RankPool) -> None:
    ranks.run(cast_buffers)
