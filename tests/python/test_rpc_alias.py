"""muster.rpc: tensors in shared memory that travel by reference."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import forks
import pytest
import torch
from launching import wait_until
from rpc_workers import run_workers

import muster
from muster import rpc
from muster.rpc import _agent

forks.preload("muster.rpc")

_kept: list[torch.Tensor] = []


@rpc.export
def fill(tensor: torch.Tensor, value: float) -> int:
    tensor.fill_(value)
    return tensor.data_ptr()


@rpc.export
def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@rpc.export
def keep(tensor: torch.Tensor) -> None:
    _kept.append(tensor)


@rpc.export
def drop() -> None:
    _kept.clear()


@rpc.export
def table() -> rpc.Alias:
    """A result by reference."""
    made = rpc.empty_shared(3, dtype=torch.int64)
    made.copy_(torch.tensor([1, 2, 3]))
    _kept.append(made)
    return rpc.alias(made)


@rpc.export
def first_of_table() -> int:
    return int(_kept[0][0])


@rpc.export
def sum_of(lists: dict[str, list[torch.Tensor]]) -> float:
    return float(sum(tensor.double().sum() for tensors in lists.values() for tensor in tensors))


def _counts() -> tuple[int, int]:
    gc.collect()
    return _agent.current().agent.ref_counts()


def _use(rank: int) -> None:
    if rank == 1:
        return
    shared = rpc.empty_shared(1000, 100)
    assert shared.shape == (1000, 100)
    assert shared.dtype == torch.float32
    assert shared.is_contiguous()
    shared.zero_()
    passed = rpc.alias(shared)
    assert passed.tensor.data_ptr() == shared.data_ptr()
    places = {rpc.rpc_sync("w1", fill, (passed, value)) for value in (1.0, 2.0)}
    assert shared[999, 99] == 2, "the other worker has written here"
    assert len(places) == 1, "the memory is mapped once"
    rpc.rpc_sync("w1", fill, (rpc.alias(shared[10:20]), 5.0))
    assert shared.sum() == 1000 * 100 * 2 + 10 * 100 * 3
    assert rpc.rpc_sync("w0", fill, (passed, 1.0)) == shared.data_ptr(), "a call of this worker itself"
    assert rpc.rpc_sync("w1", sum_of, ({"a": [passed, torch.ones(2)], "b": [passed]},)) == 200_002

    echoed = rpc.rpc_sync("w1", echo, (passed,))  # a copy: the function returned its tensor, without an alias
    assert torch.equal(echoed, shared) and echoed.data_ptr() != shared.data_ptr()
    assert all(rpc.rpc_sync("w1", echo, (passed,))[0, 0] == 1 for _ in range(50))

    result = rpc.rpc_sync("w1", table)
    assert result.tolist() == [1, 2, 3]
    result[0] = 7
    assert rpc.rpc_sync("w1", first_of_table) == 7
    rpc.rpc_sync("w1", drop)
    assert result.tolist() == [7, 2, 3], "the last tensor keeps the memory"

    rpc.rpc_sync("w1", keep, (passed,))
    del passed, result, shared
    wait_until(lambda: _counts() == (1, 0))
    rpc.rpc_sync("w1", drop)
    wait_until(lambda: _counts() == (0, 0))


def test_a_tensor_travels_by_reference() -> None:
    run_workers(2, _use)


def _check(rank: int) -> None:
    if rank == 1:
        return
    for tensor, why in [
        (torch.ones(3), "must lie in shared memory: make it with empty_shared"),
        (rpc.empty_shared(4, 4).t(), "must be contiguous"),
        (torch.ones(3, device="meta"), "only a dense CPU tensor"),
        (rpc.empty_shared(4, dtype=torch.complex64).conj(), "a conjugated or negated view"),
    ]:
        with pytest.raises(muster.ArgumentError, match=why):
            rpc.alias(tensor)
    with pytest.raises(TypeError, match="pickle"):
        rpc.rpc_sync("w1", keep, ({rpc.alias(rpc.empty_shared(1))},))
    with pytest.raises(RuntimeError, match="the limit"):
        rpc.empty_shared(1 << 50)
    assert rpc.empty_shared(0).numel() == 0
    assert rpc.empty_shared([2, 3], dtype=torch.int8).shape == (2, 3)


def test_what_cannot_travel_by_reference() -> None:
    run_workers(2, _check)


_held: list[int] = []


@rpc.export
def count_held() -> None:
    _held.append(_counts()[0])


def _die(rank: int) -> int | None:
    """A worker that holds an alias dies: its lease ends, and so does the alias."""
    if rank == 1:
        rpc.rpc_sync("w0", drop)
        tensor = rpc.rpc_sync("w0", table)
        assert tensor[0] == 1
        rpc.rpc_sync("w0", count_held)
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(lambda: _held == [1])
    wait_until(lambda: _counts() == (0, 0))
    return int(_kept.pop().sum())


def test_a_dead_worker_holds_nothing() -> None:
    options: Any = rpc.Options(lease=1)
    assert run_workers(2, _die, fixed=False, lost=(1,), rpc_backend_options=options)[0] == 6
