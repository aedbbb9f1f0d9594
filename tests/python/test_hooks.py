"""Tests the native communication hooks (muster.hooks) alone, and with muster.nn.DistributedDataParallel."""

from collections.abc import Callable
from functools import partial

import muster.nn
import muster.optim
import pytest
import torch
from ranks import run_ranks

from muster import hooks

ALL = [
    hooks.all_reduce(),
    hooks.fp16(),
    hooks.bf16(),
    hooks.int8(),
    hooks.top_k(0.25),
    hooks.power_sgd(2, start_powerSGD_iter=0),
]


def averages(rank: int) -> list[tuple[str, torch.Tensor]]:
    """The average of one gradient over eight steps, for each hook. DiLoCo subtracts it from the parameter each time."""
    gradient = torch.randn(40, 50, generator=torch.Generator().manual_seed(rank))
    results = []
    for hook in ALL:
        parameter = torch.nn.Parameter(torch.zeros(40, 50))
        plain = partial(torch.optim.SGD, lr=1.0)
        optimizer = muster.optim.DiLoCo(plain([parameter]), outer_optimizer=plain, sync_every=1, hook=hook)
        parameter.grad = gradient
        for _ in range(8):
            optimizer.step()
        results.append((hook.name, -parameter.detach() / 8))
    return results


def test_hooks_average_alike_at_all_ranks() -> None:
    first, second = run_ranks(2, averages)
    expected = torch.stack([torch.randn(40, 50, generator=torch.Generator().manual_seed(r)) for r in range(2)]).mean(0)
    losses = {}
    for (name, result), (_, other) in zip(first, second, strict=True):
        assert torch.equal(result, other), name
        losses[name] = float((result - expected).norm() / expected.norm())
    assert losses["all_reduce()"] < 1e-6
    assert losses["fp16()"] < 1e-3
    assert losses["bf16()"] < 1e-2
    assert losses["int8(block=256)"] < 1e-2, "the error of eight steps is that of one"
    assert losses["top_k(ratio=0.25)"] < 0.6
    assert losses["power_sgd(rank=2, start_powerSGD_iter=0)"] < 0.95


def test_invalid_hook_options_raise_at_creation() -> None:
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: hooks.int8(100), "int8 hook: the block must be a multiple of 64 elements, got 100"),
        (lambda: hooks.int8(0), "int8 hook: the block must be a multiple of 64 elements, got 0"),
        (lambda: hooks.top_k(2), "top-k hook: the ratio must be > 0 and <= 1, got 2"),
        (lambda: hooks.power_sgd(0), "PowerSGD hook: the rank must be > 0"),
        (
            lambda: hooks.power_sgd(min_compression_rate=0.5),
            "PowerSGD hook: min_compression_rate must be >= 1, got 0.5",
        ),
    ]
    for make, text in wrong:
        with pytest.raises(ValueError) as caught:
            make()
        assert str(caught.value).split("\n")[0] == f"invalid argument: {text}"


def with_another_backend(rank: int) -> str:
    parameter = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError) as caught:
        muster.optim.DiLoCo(torch.optim.SGD([parameter]), hook=hooks.int8())
    return str(caught.value)


def test_a_group_of_another_backend_is_refused() -> None:
    (text,) = run_ranks(1, with_another_backend, backend="gloo")
    assert "muster's hooks need a group that" in text and "gloo" in text


def train(rank: int, hook: hooks.NativeHook) -> tuple[float, list[torch.Tensor]]:
    """Trains several small layers on least squares. Returns the final loss over all data, and the parameters."""
    torch.set_num_threads(1)  # ranks share the cores
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    inputs = torch.randn(128, 32, generator=torch.Generator().manual_seed(rank))
    targets = inputs[:, :8] - inputs[:, 8:16]
    model = muster.nn.DistributedDataParallel(module, bucket_cap_mb=0.01)
    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item(), [param.detach() for param in module.parameters()]


def train_with_each(rank: int) -> list[tuple[str, float, list[torch.Tensor]]]:
    return [(hook.name, *train(rank, hook)) for hook in ALL]


def test_models_train_with_compressed_gradients() -> None:
    for (name, loss, first), (_, _, second) in zip(*run_ranks(2, train_with_each), strict=True):
        assert loss < 0.5, f"{name}: from 2 without training"
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b), f"{name}: replicas stay the same to the bit"
