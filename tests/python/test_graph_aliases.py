"""Compiled steps whose collectives share memory with other operators, or stand beside messages, give eager results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.distributed import _functional_collectives as funcol

SIDE = 8
TIMEOUT = 400  # seconds: Inductor calls a C++ compiler, and the machine may be loaded


def reduce_vectors(x: Tensor, other: Any) -> tuple[Tensor, ...]:
    """Both are merged. Their inputs are read afterwards."""
    y, z = x.sum(1), (x * x).sum(1)
    group = dist.group.WORLD
    a, b = funcol.all_reduce(y, "sum", group), funcol.all_reduce(z, "sum", group)  # type: ignore[arg-type]
    return a + 0, b + 0, y[None] @ x, z[None] @ x


def take_strided(x: Tensor, other: Any) -> tuple[Tensor, ...]:
    """The strided view begins in its own tensor, not in the bucket."""
    group = dist.group.WORLD
    a, b = funcol.all_reduce(x * 2, "sum", group), funcol.all_reduce(x * 3, "sum", group)  # type: ignore[arg-type]
    return a + 1, torch.as_strided(b, (2, 2), (1, 2), 0) + 1


def write_while_pending(x: Tensor, other: Any) -> tuple[Tensor, ...]:
    """index_put() could run in place on the input of the pending gather."""
    h = x @ x
    whole = h.new_empty(2 * SIDE, SIDE)
    work = dist.all_gather_into_tensor(whole, h, group=other, async_op=True)
    written = torch.index_put(h, (torch.tensor([1, 3]),), h.new_zeros(()))
    assert work is not None
    work.wait()
    return whole, written


def reduce_while_sent(x: Tensor, other: Any) -> tuple[Tensor, ...]:
    """A copy of what is sent is reduced in another group."""
    h = x @ x
    received = torch.empty_like(h)
    peer = 1 - dist.get_rank()
    works: list[Any] = [dist.isend(h, peer), dist.irecv(received, peer)]
    copied = h.clone()
    dist.all_reduce(copied, group=other)
    for work in works:
        work.wait()
    return received, copied


def send_in_a_ring(x: Tensor, other: Any) -> tuple[Tensor, ...]:
    """No rank may wait for its message before it has sent its own, and a merged reduction would."""
    a = x @ x
    dist.all_reduce(a)
    peer = 1 - dist.get_rank()
    sent: Any = dist.isend(a, peer, tag=0)
    message = torch.empty_like(a)
    received: Any = dist.irecv(message, peer, tag=0)
    received.wait()
    b = message @ x
    dist.all_reduce(b)
    sent.wait()
    return a, b


def compare(rank: int, program: Callable[[Tensor, Any], tuple[Tensor, ...]]) -> None:
    torch.set_num_threads(1)
    other = dist.new_group()
    torch.manual_seed(rank)
    x = torch.randn(SIDE, SIDE)
    compiled = torch.compile(program, backend="muster", fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(x, other), program(x, other))


@pytest.mark.parametrize(
    "program", [reduce_vectors, take_strided, write_while_pending, reduce_while_sent, send_in_a_ring]
)
def test_a_compiled_step_equals_eager(program: Callable[[Tensor, Any], tuple[Tensor, ...]]) -> None:
    run_ranks(2, compare, program, timeout=TIMEOUT)
