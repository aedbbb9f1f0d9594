"""Contexts of muster.rpc.autograd: which calls belong to them, and what happens once they have ended."""

from __future__ import annotations

import threading

import forks
import pytest
import torch
from launching import wait_until
from rpc_workers import run_workers

import muster
from muster import rpc
from muster.rpc import _agent, _context, autograd, optim

forks.preload("muster.rpc")

_released = threading.Event()


@rpc.export
def hold() -> None:
    assert _released.wait(60)


@rpc.export
def double(value: torch.Tensor) -> torch.Tensor:
    return 2 * value


@rpc.export
def contexts() -> int:
    return _agent.current().agent.context_count()


def _late_calls(rank: int) -> None:
    if rank != 0:
        return
    held = rpc.rpc_async("w0", hold)  # the only function that may run here at this time
    with autograd.context():
        late = rpc.rpc_async("w0", double, (torch.ones(2, requires_grad=True),))
    _released.set()
    held.wait()
    with pytest.raises(muster.Error, match="has ended"):
        late.wait()
    assert contexts() == 0


def test_a_late_call_does_not_bring_back_a_context_that_has_ended() -> None:
    run_workers(1, _late_calls, rpc_backend_options=rpc.Options(num_worker_threads=1))


def _callbacks(rank: int) -> None:
    if rank != 0:
        return
    x = torch.ones(2, requires_grad=True)
    ready: rpc.Future[None] = rpc.Future()
    with autograd.context() as context_id:
        seen = ready.then(lambda _: _context.current.get())
        doubled = ready.then(lambda _: rpc.rpc_sync("w1", double, (x,)))
        setter = threading.Thread(target=ready.set_result, args=(None,))  # this thread has no context
        setter.start()
        autograd.backward(context_id, [doubled.wait().sum()])
        setter.join()
        assert seen.wait() == context_id
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], torch.full((2,), 2.0))


def test_calls_of_a_callback_belong_to_the_context_in_which_it_was_added() -> None:
    run_workers(2, _callbacks)


def _steps_too_late(rank: int) -> None:
    if rank != 0:
        return
    weight = rpc.remote("w1", torch.ones, ((2,),), {"requires_grad": True})
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)
    with autograd.context() as context_id:
        loss = weight.to_here().sum()
        autograd.backward(context_id, [loss])
    with pytest.raises(muster.Error, match="has ended"):
        optimizer.step(context_id)
    assert torch.equal(weight.to_here(), torch.ones(2))
    del weight, optimizer
    wait_until(lambda: rpc.rpc_sync("w1", contexts) == 0)


def test_a_step_after_the_end_of_its_context_is_refused() -> None:
    run_workers(2, _steps_too_late)
