"""Contexts of muster.rpc.autograd that nobody uses for more than a minute."""

from __future__ import annotations

import os
import signal
import threading

import forks
import torch
from launching import wait_until
from rpc_workers import run_workers

from muster import rpc
from muster.rpc import _agent, autograd

forks.preload("muster.rpc")

IDLE = 60  # seconds after which a worker asks the creator of a context whether it still exists


@rpc.export
def double(value: torch.Tensor) -> torch.Tensor:
    return 2 * value


@rpc.export
def quadruple_with(value: torch.Tensor, helper: str) -> torch.Tensor:
    return double(rpc.rpc_sync(helper, double, args=(value,)))


@rpc.export
def contexts() -> int:
    return _agent.current().agent.context_count()


_is_over = threading.Event()


@rpc.export
def end() -> None:
    _is_over.set()


def _idle(rank: int) -> None:
    if rank == 2:
        assert _is_over.wait(4 * IDLE)
        return
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        if rank == 0:
            rpc.rpc_sync("w1", quadruple_with, args=(x, "w2"))
            os.kill(os.getpid(), signal.SIGKILL)
        loss = rpc.rpc_sync("w2", double, args=(x,)).sum()
        wait_until(lambda: contexts() == rpc.rpc_sync("w2", contexts) == 2, IDLE / 2)
        wait_until(lambda: contexts() == rpc.rpc_sync("w2", contexts) == 1, 3 * IDLE)
        autograd.backward(context_id, [loss])
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], torch.full((3,), 2.0))
    wait_until(lambda: contexts() == rpc.rpc_sync("w2", contexts) == 0, IDLE / 2)
    rpc.rpc_sync("w2", end)


def test_a_context_is_dropped_if_its_creator_has_died_and_kept_if_it_is_alive() -> None:
    run_workers(3, _idle, fixed=False, lost=(0,), timeout=5 * IDLE)
