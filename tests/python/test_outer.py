"""Tests muster.optim: optimizers whose ranks synchronize periodically."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import muster.optim
import pytest
import torch
from muster.optim import DiLoCo, LocalSGD
from ranks import run_ranks

from muster import hooks

PLAIN = partial(torch.optim.SGD, lr=1.0)
"""An outer optimizer that sets the parameters to the ranks' average."""


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.set_num_threads(1)  # ranks share the cores
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 4))


def make_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> float:
    inputs = torch.randn(32, 12, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), inputs[:, :4])
    loss.backward()
    optimizer.step()
    return loss.item()


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def local_sgd(rank: int) -> dict[str, torch.Tensor]:
    model = make_model(seed=rank)
    optimizer = LocalSGD(sgd(model), sync_every=3, warmup=2)
    seen = {"begin": parameters(model)}
    for step in range(1, 7):
        make_step(model, optimizer, rank, step)
        seen[str(step)] = parameters(model)
    return seen


def train_one_rank(steps: int, begin: torch.Tensor, rank: int, first: int) -> torch.Tensor:
    """The parameters after steps of one rank without synchronization."""
    model = make_model()
    torch.nn.utils.vector_to_parameters(begin.clone(), model.parameters())
    optimizer = sgd(model)
    for step in range(first, first + steps):
        make_step(model, optimizer, rank, step)
    return parameters(model)


def test_local_sgd_averages_after_warmup_and_periodically() -> None:
    first, second = run_ranks(2, local_sgd)
    together = {name for name in first if torch.equal(first[name], second[name])}
    assert together == {"begin", "1", "2", "3", "6"}
    expected = (train_one_rank(3, first["3"], 0, 4) + train_one_rank(3, first["3"], 1, 4)) / 2
    torch.testing.assert_close(first["6"], expected)


def diloco(
    rank: int, options: dict[str, Any], steps: int, make_hook: Callable[[], hooks.NativeHook] | None = None
) -> list[torch.Tensor]:
    model = make_model(seed=rank)
    optimizer = DiLoCo(sgd(model), hook=make_hook and make_hook(), **options)
    seen = [parameters(model)]
    for step in range(1, steps + 1):
        make_step(model, optimizer, rank, step)
        seen.append(parameters(model))
    optimizer.synchronize()
    return [*seen, parameters(model)]


def test_diloco_with_a_plain_outer_step_is_averaging() -> None:
    runs = run_ranks(2, diloco, {"outer_optimizer": PLAIN, "sync_every": 1}, 3)
    for step in range(3):
        begin = runs[0][step]
        assert torch.equal(begin, runs[1][step])
        expected = (train_one_rank(1, begin, 0, step + 1) + train_one_rank(1, begin, 1, step + 1)) / 2
        torch.testing.assert_close(runs[0][step + 1], expected)


def test_diloco_makes_an_outer_step_with_nesterov_momentum() -> None:
    runs = run_ranks(2, diloco, {"sync_every": 2}, 4)
    begin, momentum = runs[0][0], torch.zeros_like(runs[0][0])
    for step in (2, 4):
        reached = (train_one_rank(2, begin, 0, step - 1) + train_one_rank(2, begin, 1, step - 1)) / 2
        gradient = begin - reached
        momentum = 0.9 * momentum + gradient if step > 2 else gradient
        begin = begin - 0.7 * (gradient + 0.9 * momentum)
        torch.testing.assert_close(runs[0][step], begin)
        assert torch.equal(runs[0][step], runs[1][step])


def test_diloco_overlaps_fragments_with_steps() -> None:
    options = {"outer_optimizer": PLAIN, "sync_every": 4, "fragments": 2, "delay": 1}
    first, second = run_ranks(2, diloco, options, 8, hooks.int8)
    assert not torch.equal(first[8], second[8]), "half of what is each rank's own stays"
    assert torch.equal(first[-1], second[-1])
    free = {"outer_optimizer": PLAIN, "sync_every": 4, "fragments": 2, "delay": 1, "merge_alpha": 0.0}
    first, second = run_ranks(2, diloco, free, 8)
    half = next(make_model().parameters()).numel()  # number of elements in the first fragment
    equal = [
        (torch.equal(a[:half], b[:half]), torch.equal(a[half:], b[half:])) for a, b in zip(first, second, strict=True)
    ]
    assert [step for step, (front, _) in enumerate(equal) if front] == [0, 5, 9]
    assert [step for step, (_, back) in enumerate(equal) if back] == [0, 3, 7, 9]


def compress_outer_step(rank: int) -> list[torch.Tensor]:
    """The gradients of two matrices and a vector, then their changes in one compressed outer step. The first matrix's
    gradient has rank 1 at each rank."""
    torch.manual_seed(rank)
    model = torch.nn.ParameterList(torch.zeros(shape) for shape in ((20, 30), (30, 20), (30,)))
    optimizer = DiLoCo(
        torch.optim.SGD(model.parameters(), lr=1.0),
        outer_optimizer=PLAIN,
        sync_every=1,
        hook=hooks.power_sgd(rank=2, start_powerSGD_iter=0),
    )
    gradients = [torch.randn(parameter.shape) for parameter in model.parameters()]
    gradients[0] = torch.outer(torch.randn(20), torch.randn(30))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    return gradients + [-parameter.detach() for parameter in model.parameters()]


def test_diloco_compresses_each_matrix_separately() -> None:
    first, second = run_ranks(2, compress_outer_step)
    averages = [(a + b) / 2 for a, b in zip(first[:3], second[:3], strict=True)]
    thin, full, vector = first[3:]
    torch.testing.assert_close(thin, averages[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(vector, averages[2])
    assert torch.linalg.matrix_rank(averages[1]) == 20
    assert torch.linalg.matrix_rank(full, rtol=1e-4) == 2, "no more was sent"
    assert (full - averages[1]).norm() < averages[1].norm()
    for ours, theirs in zip(first[3:], second[3:], strict=True):
        assert torch.equal(ours, theirs)


def converge(rank: int, hook: hooks.NativeHook | None) -> float:
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    optimizer = DiLoCo(inner, sync_every=5, hook=hook)
    return [make_step(model, optimizer, rank, step) for step in range(300)][-1]


def converge_with_each(rank: int) -> list[float]:
    return [converge(rank, hook) for hook in (None, hooks.bf16(), hooks.int8())]


def test_diloco_converges_with_each_hook() -> None:
    for losses in run_ranks(2, converge_with_each):
        assert max(losses) < 0.2, "from 1 without training"


def train_and_resume(rank: int, make: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameters after twelve steps of two runs. One run makes the last six steps from a checkpoint."""
    straight, stopped = make_model(), make_model()
    plain, before = make(straight), make(stopped)
    for step in range(6):
        make_step(straight, plain, rank, step)
        make_step(stopped, before, rank, step)
    fresh = make_model(seed=9)
    fresh.load_state_dict(stopped.state_dict())
    after = make(fresh, init_sync=False)
    after.load_state_dict(before.state_dict())
    for step in range(6, 12):
        make_step(straight, plain, rank, step)
        make_step(fresh, after, rank, step)
    return parameters(straight), parameters(fresh)


def make_local_sgd(model: torch.nn.Module, **options: Any) -> LocalSGD:
    return LocalSGD(torch.optim.Adam(model.parameters()), sync_every=4, **options)


def make_diloco(model: torch.nn.Module, **options: Any) -> DiLoCo:
    return DiLoCo(torch.optim.Adam(model.parameters()), sync_every=4, **options)


def resume_each(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [train_and_resume(rank, make) for make in (make_local_sgd, make_diloco)]


def test_training_resumes_from_a_checkpoint() -> None:
    for runs in run_ranks(2, resume_each):
        for straight, fresh in runs:
            assert torch.equal(straight, fresh)


def use_as_optimizer(rank: int) -> tuple[float, int]:
    model = make_model()
    optimizer = LocalSGD(sgd(model), sync_every=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    counted = []
    optimizer.register_step_post_hook(lambda *_: counted.append(1))
    for step in range(4):
        make_step(model, optimizer, rank, step)
        scheduler.step()
    with pytest.raises(ValueError, match="cannot be added"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(ValueError, match="fragments must be between 1 and 4, got 9"):
        DiLoCo(sgd(model), sync_every=20, fragments=9)
    with pytest.raises(ValueError, match="must be < sync_every, got 2"):
        DiLoCo(sgd(model), sync_every=2, delay=2)
    with pytest.raises(ValueError, match="sync_every must be > 0"):
        LocalSGD(sgd(model), sync_every=0)
    with pytest.raises(ValueError, match="warmup must not be negative, got -1"):
        LocalSGD(sgd(model), warmup=-1)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        LocalSGD(sgd(model), params=[])
    with pytest.warns(DeprecationWarning, match="the argument mixing is now called merge_alpha"):
        DiLoCo(sgd(model), mixing=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"LocalSGD wraps an optimizer, .*, not <generator"):
        LocalSGD(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"hook must be one of muster\.hooks, .*int8\(\), not <function"):
        DiLoCo(sgd(model), hook=muster.hooks.int8)  # type: ignore[arg-type]
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"LocalSGD belongs to a process group.*state_dict"):
            copied(optimizer)
    assert copy.deepcopy(optimizer.state_dict())["steps"] == 4
    return float(optimizer.param_groups[0]["lr"]), len(counted)


def test_wrappers_behave_as_optimizers() -> None:
    assert run_ranks(2, use_as_optimizer) == [(0.025, 4)] * 2
    assert isinstance(muster.optim.LocalSGD, type) and issubclass(LocalSGD, torch.optim.Optimizer)


def scale_gradients(rank: int) -> tuple[list[torch.Tensor], float]:
    """Makes two steps with a scaler: one with gradients of 1, one with infinite gradients."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = LocalSGD(torch.optim.SGD([weight], lr=1.0, fused=True), sync_every=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = []
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(weight.detach().clone())
    return seen, scaler.get_scale()


def test_grad_scaler_unscales_before_a_fused_step() -> None:
    for seen, scale in run_ranks(2, scale_gradients):
        assert torch.equal(seen[0], torch.full((2,), -1.0))
        assert torch.equal(seen[1], seen[0]), "infinite gradients are no step"
        assert scale == 512
