"""muster.rpc.autograd: gradients flow back through remote calls. They must equal those of a graph in one process."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rpc_workers import run_workers
from torch import nn

import muster
from muster import rpc
from muster.rpc import _agent, autograd

forks.preload("muster.rpc")

_parameters: dict[str, torch.Tensor] = {}


def parameter(name: str, *sizes: int) -> torch.Tensor:
    """The same values at each worker and in the reference, made from the name."""
    if name not in _parameters:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        _parameters[name] = torch.rand(*sizes, generator=generator, requires_grad=True)
    return _parameters[name]


@rpc.export
def scale(value: torch.Tensor, name: str) -> torch.Tensor:
    return value * parameter(name, 3)


@rpc.export
def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


@rpc.export
def through(value: torch.Tensor, name: str, path: list[str]) -> torch.Tensor:
    """Scales here, and then at the workers of the path."""
    value = value * parameter(name, 3)
    return rpc.rpc_sync(path[0], through, args=(value, f"{name} twice", path[1:])) if path else value


@rpc.export
async def scale_slowly(value: torch.Tensor, name: str) -> torch.Tensor:
    return await rpc.rpc_async("w0", scale, args=(value * parameter(name, 3), "of w0"))


@rpc.export
def gradient(context_id: int, name: str) -> torch.Tensor | None:
    return autograd.get_gradients(context_id).get(_parameters[name])


@rpc.export
def contexts() -> int:
    return _agent.current().agent.context_count()


def _wait_for_no_contexts(*workers: str) -> None:
    deadline = time.monotonic() + 30
    for worker in workers:
        while rpc.rpc_sync(worker, contexts) > 0:
            assert time.monotonic() < deadline, f"{worker} keeps a context"
            time.sleep(0.01)  # tidy: allow(sleep) the end of a context has no event


def _check_gradients(context_id: int, loss: torch.Tensor, places: dict[str, str]) -> None:
    """`loss`: of the same computation in one process. `places`: the worker of each parameter, by name."""
    expected = torch.autograd.grad(loss, [_parameters[name] for name in places], allow_unused=True)
    for (name, worker), wanted in zip(places.items(), expected, strict=True):
        found = rpc.rpc_sync(worker, gradient, args=(context_id, name))
        if wanted is None:
            assert found is None, name
        else:
            torch.testing.assert_close(found, wanted, msg=f"the gradient of {name}")


# ---- two workers


def _there_and_back(rank: int) -> None:
    if rank != 0:
        return
    x = parameter("x", 3)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("w1", scale, args=(x, "y")).sum()])
        _check_gradients(context_id, (x * parameter("y", 3)).sum(), {"x": "w0", "y": "w1"})
        assert x.grad is None
    _wait_for_no_contexts("w0", "w1")


def test_gradients_flow_back_through_a_call() -> None:
    run_workers(2, _there_and_back)


def _unused(rank: int) -> None:
    if rank != 0:
        return
    x = parameter("x", 3)
    with autograd.context() as context_id:
        used = rpc.rpc_sync("w1", scale, args=(x, "y"))
        rpc.rpc_sync("w1", scale, args=(used, "z"))  # its result is dropped
        rpc.rpc_async("w1", through, args=(x, "z", ["w0", "w1"])).wait()
        loss = used.sum() + rpc.rpc_async("w1", scale, args=(x, "y")).wait()[0]
        autograd.backward(context_id, [loss])
        x_there = x * parameter("y", 3)
        parameter("z", 3)
        _check_gradients(context_id, x_there.sum() + x_there[0], {"x": "w0", "y": "w1"})
        assert not autograd.get_gradients(context_id).keys() - {x}
    with autograd.context() as context_id:  # nothing comes back, and nobody reads the answers
        rpc.rpc_async("w1", scale, args=(x, "y"))
        autograd.backward(context_id, [x.sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], torch.ones(3))
    _wait_for_no_contexts("w0", "w1")


def test_tensors_that_the_loss_does_not_use_make_nobody_wait() -> None:
    run_workers(2, _unused)


def _several(rank: int) -> None:
    if rank != 0:
        return
    x = parameter("x", 3)
    with autograd.context() as first, pytest.raises(RuntimeError, match="cannot be nested"), autograd.context():
        pass
    with autograd.context() as first:
        loss = rpc.rpc_sync("w1", scale, args=(x, "y")).sum()
        for _ in range(2):
            autograd.backward(first, [loss], retain_graph=True)
        torch.testing.assert_close(autograd.get_gradients(first)[x], 2 * parameter("y", 3))
        autograd.backward(first, [loss, loss])
        torch.testing.assert_close(autograd.get_gradients(first)[x], 4 * parameter("y", 3))
        with pytest.raises(RuntimeError, match="second time"):
            autograd.backward(first, [loss])
    with pytest.raises(muster.Error, match="has ended"):
        autograd.get_gradients(first)
    with autograd.context() as context_id:
        with pytest.raises(ValueError, match="depends on no parameter"):
            autograd.backward(context_id, [torch.ones(1)])
        with pytest.raises(ValueError, match="one element"):
            autograd.backward(context_id, [x])
        received = rpc.rpc_sync("w1", scale, args=(x, "y"))
        with pytest.raises(Exception, match=r"worker \"w1\" has sent"):
            received.sum().backward()
    _wait_for_no_contexts("w0", "w1")


def test_backward_runs_again_if_the_graph_is_kept() -> None:
    run_workers(2, _several)


def _kinds(rank: int) -> None:
    if rank != 0:
        return
    weight = nn.Parameter(torch.rand(3))
    _parameters["weight"] = weight
    x = parameter("x", 3)
    with autograd.context() as context_id:
        remote = rpc.remote("w1", scale, args=(weight, "y"))  # a parameter, a reference, a coroutine
        loss = (rpc.rpc_sync("w1", scale_slowly, args=(remote.to_here(), "z")) * x).sum()
        autograd.backward(context_id, [loss])
        local = (weight * parameter("y", 3) * parameter("z", 3) * parameter("of w0", 3) * x).sum()
        _check_gradients(context_id, local, {"weight": "w0", "x": "w0", "of w0": "w0", "y": "w1", "z": "w1"})
    _wait_for_no_contexts("w0", "w1")


def test_gradients_flow_through_references_and_coroutines() -> None:
    run_workers(2, _kinds)


def _own_memory(rank: int) -> None:
    if rank != 0:
        return
    a, b = parameter("a", 3), parameter("b", 3)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("w1", add, args=(a, b)).sum() + (a + b).sum() + b.sum()])
        gradients = autograd.get_gradients(context_id)
        gradients[a].mul_(2)  # fails for memory that several elements share
        torch.testing.assert_close(gradients[a], torch.full((3,), 4.0))
        torch.testing.assert_close(gradients[b], torch.full((3,), 3.0))
    with autograd.context() as context_id:
        autograd.backward(context_id, [(a + b).sum()])
        gradients = autograd.get_gradients(context_id)
        gradients[a].mul_(2)
        torch.testing.assert_close(gradients[b], torch.ones(3))


def test_gradients_share_no_memory() -> None:
    run_workers(2, _own_memory)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in the backward pass")


@rpc.export
def fails_later(value: torch.Tensor) -> torch.Tensor:
    return Fails.apply(value)  # type: ignore[no-any-return, no-untyped-call]


def _errors(rank: int) -> None:
    if rank != 0:
        return
    x = parameter("x", 3)
    for function in (lambda: rpc.rpc_sync("w1", fails_later, args=(x,)), lambda: fails_later(x)):
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("w1", scale, args=(function(), "y")).sum()
            with pytest.raises(ZeroDivisionError, match="in the backward pass"):
                autograd.backward(context_id, [loss])
    with autograd.context() as context_id:  # the worker works on
        autograd.backward(context_id, [rpc.rpc_sync("w1", scale, args=(x, "y")).sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], parameter("y", 3))
    _wait_for_no_contexts("w0", "w1")


def test_an_exception_in_the_backward_pass_is_raised_where_it_began() -> None:
    run_workers(2, _errors)


# ---- several workers


def _chain(rank: int) -> None:
    if rank != 0:
        return
    x = parameter("x", 3)
    with autograd.context() as context_id:
        path = ["w2", "w3", "w1", "w0"]
        value = rpc.rpc_sync("w1", through, args=(x, "y", path))
        autograd.backward(context_id, [value.sum()])
        names = ["y" + " twice" * times for times in range(5)]
        local = x
        for name in names:
            local = local * parameter(name, 3)
        _check_gradients(context_id, local.sum(), {"x": "w0", **dict(zip(names, ["w1", *path], strict=True))})
    _wait_for_no_contexts("w0", "w1", "w2", "w3")


def test_a_call_that_passes_through_four_workers() -> None:
    run_workers(4, _chain)


Step = tuple[str, int, int, int]  # what to do, at which worker, with which of the values so far


def _random_graphs(rank: int, graphs: list[list[list[Step]]]) -> None:
    """All workers begin contexts at the same time. Each has graphs of its own."""
    for steps in graphs[rank]:
        name = f"of {rank}"
        places = {name: f"w{rank}"}
        remote, local = [parameter(name, 3)], [parameter(name, 3)]
        with autograd.context() as context_id:
            for kind, index, first, second in steps:
                worker, a, b = f"w{index}", first % len(remote), second % len(remote)
                scaled = f"{rank} at {worker}"
                if kind == "add there":
                    remote.append(rpc.rpc_sync(worker, add, args=(remote[a], remote[b])))
                    local.append(local[a] + local[b])
                elif kind == "multiply here":
                    remote.append((remote[a] * remote[b]).tanh())
                    local.append((local[a] * local[b]).tanh())
                else:
                    path = [f"w{(index + 1) % 4}"] if kind == "scale at two" else []
                    remote.append(rpc.rpc_sync(worker, through, args=(remote[a], scaled, path)))
                    local.append(local[a] * parameter(scaled, 3))
                    places[scaled] = worker
                    if path:
                        local[-1] = local[-1] * parameter(f"{scaled} twice", 3)
                        places[f"{scaled} twice"] = path[0]
            count = 1 + steps[0][1] % len(remote)
            autograd.backward(context_id, [value.sum() for value in remote[-count:]])
            _check_gradients(context_id, sum(value.sum() for value in local[-count:]), places)  # type: ignore[arg-type]


_KINDS = st.sampled_from(["add there", "multiply here", "scale", "scale at two"])
_STEPS = st.lists(st.tuples(_KINDS, st.integers(0, 3), st.integers(0, 11), st.integers(0, 11)), min_size=1, max_size=12)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.lists(_STEPS, min_size=4, max_size=6), min_size=4, max_size=4))
def test_gradients_of_random_graphs_equal_those_of_one_process(graphs: list[list[list[Step]]]) -> None:
    run_workers(4, _random_graphs, graphs)


# ---- faults


@rpc.export
def die_in_backward(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    return value


_may_leave = threading.Event()


@rpc.export
def may_leave() -> None:
    _may_leave.set()


def _death(rank: int) -> None:
    if rank != 0:
        _may_leave.wait(60)  # the last one dies
        return
    x = parameter("x", 3)
    with autograd.context() as context_id:
        value = rpc.rpc_sync("w1", scale, args=(x, "y"))
        value = rpc.rpc_sync("w2", die_in_backward, args=(value,))
        loss = rpc.rpc_sync("w1", scale, args=(value, "y")).sum()
        with pytest.raises(muster.PeerLostError, match='worker "w2"'):
            autograd.backward(context_id, [loss])
    _wait_for_no_contexts("w0", "w1")
    rpc.rpc_sync("w1", may_leave)


def test_a_worker_that_dies_in_the_backward_pass_ends_it_at_all_workers() -> None:
    run_workers(3, _death, fixed=False, lost=(2,))


@rpc.export
def wait_in_backward(value: torch.Tensor, seconds: float) -> torch.Tensor:
    value = value.clone()
    value.register_hook(lambda _: time.sleep(seconds))  # tidy: allow(sleep) stands for work
    return value


def _deadline(rank: int) -> None:
    if rank != 0:
        return
    x = parameter("x", 3)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("w1", wait_in_backward, args=(x, 1.5)).sum()
        with pytest.raises(muster.TimeoutError):
            autograd.backward(context_id, [loss], timeout=0.3)
    _wait_for_no_contexts("w0", "w1")


def test_a_backward_pass_ends_at_its_deadline() -> None:
    run_workers(2, _deadline)


# ---- modules and optimizers


def _train(rank: int) -> None:
    if rank != 0:
        return
    torch.manual_seed(0)
    steps = [(torch.rand(5, 4), torch.rand(5, 2)) for _ in range(4)]
    for optimizer_class, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.01}),
    ):
        layers = [rpc.RemoteModule("w1", nn.Linear, args=(4, 8)), rpc.RemoteModule("w2/cpu", nn.Linear, args=(8, 2))]
        local = nn.Sequential(*(layer.get_module_rref().to_here() for layer in layers))
        params = [param for layer in layers for param in layer.remote_parameters()]
        distributed = rpc.optim.DistributedOptimizer(optimizer_class, params, **options)
        here = optimizer_class(local.parameters(), **options)  # type: ignore[arg-type]
        for inputs, targets in steps:
            with autograd.context() as context_id:
                outputs = layers[1](layers[0](inputs))
                autograd.backward(context_id, [nn.functional.mse_loss(outputs, targets)])
                distributed.step(context_id)
            here.zero_grad()
            nn.functional.mse_loss(local(inputs), targets).backward()  # type: ignore[no-untyped-call]
            here.step()
        for param, wanted in zip(params, local.parameters(), strict=True):
            torch.testing.assert_close(param.to_here(), wanted)


def test_remote_modules_train_as_local_ones() -> None:
    run_workers(3, _train)


@rpc.export
class Dropping(nn.Module):
    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        if fails:
            raise ZeroDivisionError("no module")
        self.dropout = nn.Dropout(0.5)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.dropout(value)  # type: ignore[no-any-return]


@rpc.export
def no_module() -> Any:
    return {}


@rpc.export
def call(module: rpc.RemoteModule, value: torch.Tensor) -> torch.Tensor:
    return module(value)  # type: ignore[no-any-return]


@rpc.export
class FailingOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ZeroDivisionError("no step")


def _modules(rank: int) -> None:
    if rank != 0:
        return
    module = rpc.RemoteModule("w1", Dropping)
    ones = torch.ones(100)
    assert (module(ones) == 0).any()
    module.eval()
    assert (module(ones) == 1).all()
    assert (rpc.rpc_sync("w2", call, args=(module, ones)) == 1).all()
    assert (rpc.RemoteModule("w0", nn.Identity)(ones) == 1).all()
    with pytest.raises(ZeroDivisionError, match="no module"):
        rpc.RemoteModule("w1", Dropping, kwargs={"fails": True})
    with pytest.raises(ValueError, match=r"torch\.nn\.Module, not dict"):
        rpc.RemoteModule("w1", no_module)
    with pytest.raises(ValueError, match="cuda"):
        rpc.RemoteModule("w1/cuda:0", nn.Linear, args=(1, 1))
    with pytest.raises(ValueError, match="at least one parameter"):
        rpc.optim.DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
    here: Any = module
    for use in (here.parameters, here.buffers, here.half, here.zero_grad, nn.Sequential(module).state_dict):
        with pytest.raises(ValueError, match="of a module at worker 'w1' from here"):
            list(use())
    with pytest.raises(ValueError, match="load it in a function"):
        module.load_state_dict({})
    assert list(nn.Sequential(module, nn.Linear(1, 1, bias=False)).parameters()), "those that are here"
    params = rpc.RemoteModule("w1", nn.Linear, args=(1, 1)).remote_parameters()
    with pytest.raises(ValueError, match="learning rate"):
        rpc.optim.DistributedOptimizer(torch.optim.SGD, params, lr=-1)
    optimizer = rpc.optim.DistributedOptimizer(FailingOptimizer, params, lr=1)
    with autograd.context() as context_id, pytest.raises(ZeroDivisionError, match="no step"):
        optimizer.step(context_id)


def test_modules_and_optimizers_that_fail() -> None:
    run_workers(3, _modules)


# ---- DistributedDataParallel


def _ddp(rank: int, folder: str) -> None:
    if rank == 2:
        return  # the server
    torch.manual_seed(0)
    dist.init_process_group("muster", store=dist.FileStore(f"{folder}/ddp"), world_size=2, rank=rank)
    local = nn.Linear(3, 3)
    shared = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    shared.module.load_state_dict(local.state_dict())
    inputs = torch.rand(2, 4, 3)
    own = parameter("bias", 3)
    for _ in range(3):
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("w2", scale, args=(shared(inputs[rank]) + own, "y")).sum()])
            found = autograd.get_gradients(context_id)
        loss = sum(((local(each) + own) * parameter("y", 3)).sum() for each in inputs) / 2
        wanted = torch.autograd.grad(loss, [local.weight, local.bias])
        torch.testing.assert_close([found[param] for param in shared.parameters()], list(wanted))
        torch.testing.assert_close(found[own], 4 * parameter("y", 3))
        assert all(param.grad is None for param in shared.parameters())
    _wait_for_no_contexts(f"w{rank}")
    dist.destroy_process_group()


def test_a_part_of_the_model_is_wrapped_in_ddp(tmp_path: Path) -> None:
    run_workers(3, _ddp, str(tmp_path))
