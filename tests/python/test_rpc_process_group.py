"""muster.rpc over the send and receive of a process group, with Gloo and with muster's own backend."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path

import forks
import pytest
import torch
import torch.distributed as dist
from launching import wait_until
from rpc_workers import run_workers

import muster
from muster import rpc

forks.preload("muster.rpc")
BACKENDS = ["gloo", "muster"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@rpc.export
def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@rpc.export
def ask(name: str, value: int) -> int:
    """A nested call."""
    return rpc.rpc_sync(name, add, (value, 1)) if name else value


@rpc.export
def add(a: int, b: int) -> int:
    return a + b


@rpc.export
def fail() -> None:
    raise ValueError("by purpose")


@rpc.export
def sleep(seconds: float) -> None:
    time.sleep(seconds)  # tidy: allow(sleep) a function that takes long


@rpc.export
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, count: int) -> int:
        self.count += count
        return self.count


def _use(rank: int) -> None:
    size = dist.get_world_size()
    others = [f"w{other}" for other in range(size) if other != rank]
    assert len(rpc.workers()) == size
    for other in others:
        for count in (0, 1, 200, 1000, 300_000, 5_000_001):
            tensor = torch.arange(count, dtype=torch.float32)
            assert torch.equal(rpc.rpc_sync(other, double, (tensor,)), tensor * 2)
        assert rpc.rpc_sync(other, ask, (f"w{rank}", 7)) == 8
        with pytest.raises(ValueError, match="by purpose"):
            rpc.rpc_sync(other, fail)
        with pytest.raises(muster.TimeoutError):
            rpc.rpc_sync(other, sleep, (1,), timeout=0.1)
        counter = rpc.remote(other, Counter)
        assert [counter.rpc_sync().add(n) for n in (1, 2, 3)] == [1, 3, 6]
    futures = [rpc.rpc_async(others[n % len(others)], add, (n, n)) for n in range(3000)]
    assert [future.wait() for future in futures] == [2 * n for n in range(3000)]
    large = [rpc.rpc_async(other, double, (torch.ones(3_000_000),)) for other in others for _ in range(4)]
    assert all(bool((future.wait() == 2).all()) for future in large)
    # The group goes on working for others, at the same time.
    total = torch.ones(4)
    dist.all_reduce(total)
    assert total.tolist() == [size] * 4


def test_calls_travel_over_a_process_group(backend: str) -> None:
    run_workers(3, _use, over=backend)


_released = threading.Event()


@rpc.export
def release() -> None:
    _released.set()


def _die(rank: int) -> str:
    if rank == 1:
        rpc.rpc_sync("w0", add, (1, 1))
        time.sleep(0.2)  # tidy: allow(sleep) so that it dies in the middle of a call
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        assert _released.wait(60)
        return "lived"
    with pytest.raises(muster.Error) as raised:
        rpc.rpc_sync("w1", sleep, (60,), timeout=40)
    rpc.rpc_sync("w2", release)
    return type(raised.value).__name__


def test_only_calls_to_a_worker_that_died_fail() -> None:
    """With Gloo. A group of muster fails as a whole when a rank dies."""
    results = run_workers(3, _die, over="gloo", lost=(1,), fixed=False)
    assert results[0] == "PeerLostError"
    assert results[2] == "lived"


def _threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _again(rank: int, path: str) -> None:
    """Leaves, and joins again over the same group. No thread is left behind."""
    counts: list[int] = []
    for turn in range(3):
        assert rpc.rpc_sync(f"w{1 - rank}", add, (turn, rank)) == turn + rank
        rpc.shutdown()
        gc.collect()
        if counts:
            wait_until(lambda: _threads() <= counts[0])
        counts.append(_threads())
        store = dist.FileStore(f"{path}{turn}")
        rpc.init_rpc(f"w{rank}", "process_group", rank, 2, rpc.Options(rpc_timeout=60), store=store)


def test_workers_may_join_again(backend: str, tmp_path: Path) -> None:
    run_workers(2, _again, str(tmp_path / "again"), over=backend)


def test_without_a_process_group(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"))
    with pytest.raises(ValueError, match=r"call init_process_group\(\) first"):
        rpc.init_rpc("w0", "process_group", 0, 1, store=store)
    with pytest.raises(ValueError, match="it has 'muster' and 'process_group'"):
        rpc.init_rpc("w0", "carrier_pigeon", 0, 1, store=store)
    assert not rpc.is_initialized()
