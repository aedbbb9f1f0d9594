"""Tests the errors of muster.nn.DistributedDataParallel for wrong use, and its state after a rank dies."""

from __future__ import annotations

import copy
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from muster._group import backend_of
from muster.nn import DistributedDataParallel
from ranks import RankPool, run_ranks
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

import muster
from muster import hooks


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            x = self.used(x)
        return x


def different_models(rank: int) -> str:
    with pytest.raises(muster.MismatchError) as caught:
        DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2 + rank)))
    return str(caught.value)


def test_different_models_are_reported_by_parameter(ranks: RankPool) -> None:
    for text in ranks.run(different_models):
        assert "1.weight" in text
        assert "rank 1" in text
        assert "[3, 3]" in text
        assert "[2, 3]" in text


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("wide", torch.zeros(6))
        self.register_buffer("high", torch.zeros(2, 3))


def other_buffers(rank: int) -> nn.Module:
    module = Plain()
    if rank == 1:  # the number of elements in all is the same
        module.wide, module.high = torch.zeros(2, 3), torch.zeros(6)
    return module


def other_frozen_shape(rank: int) -> nn.Module:
    module = Plain()
    module.second = nn.Linear(2, 3 + rank).requires_grad_(False)
    return module


def other_frozen_set(rank: int) -> nn.Module:
    module = Plain()
    (module.second if rank == 1 else module.first).requires_grad_(False)
    return module


def other_names(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2)) if rank == 0 else nn.ModuleDict({"one": nn.Linear(2, 2)})


DIFFERING = {
    other_buffers: r"buffer 0 differs: rank 1 has wide: Float\[2, 3\], rank 0 has wide: Float\[6\]",
    other_frozen_shape: r"rank 1 has second.weight: Float\[4, 2\] without gradient, rank 0 has .* Float\[3, 2\]",
    other_frozen_set: r"rank 1 has first.weight: Float\[2, 2\], rank 0 has .* Float\[2, 2\] without gradient",
    other_names: r"rank 1 has one.weight: Float\[2, 2\], rank 0 has 0.weight: Float\[2, 2\]",
}


def different_buffers_and_names(rank: int) -> None:
    for make, text in DIFFERING.items():
        with pytest.raises(muster.MismatchError, match=text):
            DistributedDataParallel(make(rank))
    DistributedDataParallel(other_buffers(rank), broadcast_buffers=False)  # the buffers of the ranks stay different
    ignoring = other_buffers(rank)
    ignoring._ddp_params_and_buffers_to_ignore = ["wide", "high"]  # type: ignore[assignment]
    DistributedDataParallel(ignoring)


def test_different_buffers_and_names_are_reported(ranks: RankPool) -> None:
    ranks.run(different_buffers_and_names)


def of_another_backend(rank: int) -> None:
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(
        TypeError, match=r'needs a process group .* "muster", not "gloo": .* init_process_group\("muster"\)'
    ):
        DistributedDataParallel(TwoLayers(), process_group=gloo)


def on_another_device(rank: int) -> None:
    with pytest.raises(ValueError, match=r"the parameter used.weight is on meta and has no data: call to_empty"):
        DistributedDataParallel(TwoLayers().to("meta"), init_sync=False)
    with pytest.raises(RuntimeError, match="not needed when a module doesn't have any parameter that requires"):
        DistributedDataParallel(TwoLayers().requires_grad_(False))
    with pytest.raises(TypeError, match=r"wraps a torch\.nn\.Module, not <function"):
        DistributedDataParallel(on_another_device)
    with pytest.raises(ValueError, match="bucket_cap_mb must be a size in MiB of at least 0, got -1"):
        DistributedDataParallel(TwoLayers(), bucket_cap_mb=-1)


def leave_parameter_unused(rank: int) -> str:
    model = DistributedDataParallel(TwoLayers())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration") as caught:
        model(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        model._check_reducer_finalized()
    return str(caught.value)


def test_a_parameter_that_gets_no_gradient_is_named(ranks: RankPool) -> None:
    for text in ranks.run(leave_parameter_unused):
        assert "spare.weight" in text
        assert "find_unused_parameters=True" in text


def wrap_twice(rank: int) -> None:
    from torch.utils.checkpoint import checkpoint

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.zero, self.one = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.zero(x)
            for _ in range(2):  # each checkpoint has its own backward, so two gradients arrive
                x = checkpoint(self.one, x, use_reentrant=True)
            return x

    model = DistributedDataParallel(Shared())
    with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once"):
        model(torch.ones(1, 2)).sum().backward()
    logged = model._get_ddp_logging_data()
    assert logged["has_error"] == 1
    assert "ready only once" in logged["error"]


def register_wrong_hooks(rank: int) -> None:
    def hook(state, bucket):  # type: ignore[no-untyped-def] # torch would look at annotations
        raise OverflowError("no more")

    model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook(None, 1)
    with pytest.raises(TypeError, match=r"makes a hook: register_comm_hook\(None, muster.hooks.int8\(\)\)"):
        model.register_comm_hook(None, hooks.int8)
    model.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, hook)
    for _ in range(2):  # the second failure is like the first: a step whose hook failed leaves no state
        with pytest.raises(OverflowError, match="no more"):
            model(torch.ones(1, 2)).sum().backward()


def keep_gradients(state, bucket):  # type: ignore[no-untyped-def] # torch would look at annotations
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def register_again(model: Any) -> None:
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, keep_gradients)


# Each function returns a call that takes the reducer's lock.
REDUCER_CALLS: dict[str, Callable[[Any], Callable[[], object]]] = {
    "register_comm_hook": lambda model: functools.partial(register_again, model),
    "_set_backend": lambda model: functools.partial(model.reducer._set_backend, backend_of(None)),
    "_set_reduction_dtype": lambda model: functools.partial(model.reducer._set_reduction_dtype, torch.float32),
}


def calling_during_backward(rank: int, name: str) -> None:
    """Backward, on another thread, holds the reducer's lock while the hook runs, which needs the GIL."""
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False), process_group=dist.new_group())
    within, go_on = threading.Event(), threading.Event()

    def hook(state, bucket):  # type: ignore[no-untyped-def] # torch would look at annotations
        within.set()
        assert go_on.wait(60)
        return keep_gradients(state, bucket)  # type: ignore[no-untyped-call]

    model.register_comm_hook(None, hook)
    call = REDUCER_CALLS[name](model)  # not later: backend_of() may release the GIL, and the hook would end
    backward = threading.Thread(target=lambda: model(torch.ones(1, 2)).sum().backward(), daemon=True)
    interval = sys.getswitchinterval()
    backward.start()
    assert within.wait(60)
    try:
        sys.setswitchinterval(60)  # this thread keeps the GIL until it blocks
        go_on.set()
        call()  # a call that kept the GIL would never return
    finally:
        sys.setswitchinterval(interval)
    backward.join(60)
    assert not backward.is_alive()


@pytest.mark.parametrize("name", REDUCER_CALLS)
def test_another_thread_may_call_the_reducer_while_a_hook_runs(ranks: RankPool, name: str) -> None:
    ranks.run(calling_during_backward, name)


@pytest.mark.parametrize("case", [of_another_backend, on_another_device, wrap_twice, register_wrong_hooks])
def test_wrong_uses_raise_clear_errors(ranks: RankPool, case: object) -> None:
    ranks.run(case)  # type: ignore[arg-type]


def twice_backward(model: nn.Module, x: Tensor) -> None:
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def forwards_first(model: nn.Module, x: Tensor) -> None:
    losses = [model(x).sum(), model(2 * x).sum()]
    for loss in losses:
        loss.backward()


def forward_unsynced(model: Any, x: Tensor) -> None:
    with model.no_sync():
        loss = model(x).sum()
    loss.backward()


def backward_unsynced(model: Any, x: Tensor) -> None:
    loss = model(x).sum()
    with model.no_sync():
        loss.backward()


def unsynced(model: Any, x: Tensor) -> None:
    with model.no_sync():
        model(x).sum().backward()


USES = [twice_backward, forwards_first, forward_unsynced, backward_unsynced, unsynced]


def use_both(rank: int) -> None:
    """Makes a step of each use and then an ordinary step, with muster's and with torch's DDP, and compares them."""
    for use in USES:
        trained = []
        for kind in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
            torch.manual_seed(1)
            model = kind(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for act in (use, lambda model, x: model(x).sum().backward()):
                optimizer.zero_grad()
                act(model, torch.full((2, 3), rank + 1.0))
                optimizer.step()
            trained.append(list(model.parameters()))
        torch.testing.assert_close(*trained, msg=f"{use.__name__}: {{}}".format)


def test_backward_without_forward_matches_torch(ranks: RankPool) -> None:
    ranks.run(use_both)


def change_parameters(rank: int) -> list[str]:
    def replace(module: TwoLayers) -> None:
        module.used.weight = nn.Parameter(torch.ones(2, 2))

    def freeze(module: TwoLayers) -> None:
        module.used.weight.requires_grad_(False)

    texts = []
    for change in (replace, freeze, lambda module: module.double()):
        model = DistributedDataParallel(TwoLayers(), find_unused_parameters=False)
        change(model.module)
        with pytest.raises(RuntimeError) as caught:
            for _ in range(2):
                model(torch.ones(1, 2, dtype=model.module.used.bias.dtype), 2).sum().backward()
        texts.append(str(caught.value))
    return texts


def test_parameters_changed_after_wrapping_are_named(ranks: RankPool) -> None:
    for replaced, frozen, widened in ranks.run(change_parameters):
        assert "used.weight" in replaced
        assert "used.weight" in frozen
        assert "used.weight) has another dtype" in widened


def end_data_early(rank: int) -> None:
    """Rank 1 has one batch less than rank 0."""
    hasty = dist.new_group()
    model = DistributedDataParallel(nn.Linear(2, 1), process_group=hasty)
    model(torch.ones(1, 2)).sum().backward()
    dist.barrier()  # until here, ranks may be late without a timeout
    if rank == 0:
        c10d._set_pg_timeout(timedelta(seconds=1), hasty)
        with pytest.raises(muster.TimeoutError, match="rank 1"):
            model(torch.ones(1, 2)).sum().backward()
    dist.barrier()


def test_a_rank_without_data_is_named_by_the_others(ranks: RankPool) -> None:
    ranks.run(end_data_early)


def with_fp16(model: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def with_power_sgd(model: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    model.register_comm_hook(power.PowerSGDState(None, start_powerSGD_iter=2), power.powerSGD_hook)


def with_optimizer(model: Any) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


HOOKS: dict[str, Callable[[Any], None]] = {
    "none": lambda model: None,
    "int8": lambda model: model.register_comm_hook(None, hooks.int8()),
    "fp16": with_fp16,
    "PowerSGD": with_power_sgd,
    "optimizer in backward": with_optimizer,
}


def lose_rank_in_backward(rank: int, hook: str) -> list[float] | None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), bucket_cap_mb=0.0002)
    HOOKS[hook](model)
    x = torch.full((2, 8), float(rank))
    for _ in range(3):
        model(x).sum().backward()
    if rank == 1:
        model.module[3].weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(muster.PeerLostError, match="rank 1"):
        model(x).sum().backward()
    with pytest.raises(dist.DistBackendError):  # the next call fails too, and does not hang
        model(x).sum().backward()

    dist.shrink_group([1], shrink_flags=c10d.SHRINK_ABORT)
    assert dist.get_world_size() == 2
    module = copy.deepcopy(model.module)  # the copy has no optimizers on its parameters
    del model
    module.zero_grad()
    again = DistributedDataParallel(module, bucket_cap_mb=0.0002)
    again(x).sum().backward()
    alone = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    alone.load_state_dict(module.state_dict())
    (alone(torch.zeros(2, 8)).sum() + alone(torch.full((2, 8), 2.0)).sum()).div(2).backward()
    for ours, expected in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)
    return [float(each.grad.sum()) for each in module.parameters() if each.grad is not None]


@pytest.mark.parametrize("hook", HOOKS)
def test_ranks_survive_a_death_in_backward(hook: str) -> None:
    first, lost, last = run_ranks(3, lose_rank_in_backward, hook, lost=(1,))
    assert lost is None
    assert first == last
