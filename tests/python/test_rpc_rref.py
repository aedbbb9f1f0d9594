"""muster.rpc.RRef: references to values at other workers."""

from __future__ import annotations

import dataclasses
import gc
import os
import pathlib
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import torch
from launching import wait_until
from rpc_workers import run_workers

import muster
from muster import rpc
from muster.rpc import _agent

forks.preload("muster.rpc")


@rpc.export
class Model:
    """Holds a lock, so it cannot be sent."""

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self.weights = torch.zeros(size)
        self._secret = 1

    def add(self, gradient: torch.Tensor) -> int:
        with self.lock:
            self.weights += gradient
        return len(self.weights)

    def get(self) -> torch.Tensor:
        with self.lock:
            return self.weights.clone()

    async def get_slowly(self) -> torch.Tensor:
        return self.weights

    @rpc.functions.async_execution
    def sum_at(self, other: str) -> rpc.Future[Any]:
        return rpc.rpc_async(other, torch.sum, (self.weights,)).then(lambda future: future.wait() + 1)


@rpc.export
@dataclasses.dataclass
class Holder:
    ref: rpc.RRef[Any]
    note: str


@rpc.export
def make(value: Any) -> Any:
    return value


@rpc.export
def make_adder(shift: int) -> Any:
    return lambda value: value + shift


@rpc.export
def fail() -> None:
    raise ZeroDivisionError("no value")


@rpc.export
async def make_slowly(value: Any) -> Any:
    return value


@rpc.export
def read(ref: rpc.RRef[Any]) -> Any:
    return ref.to_here()


@rpc.export
def read_holder(holder: Holder) -> Any:
    return holder.ref.to_here(), holder.note


@rpc.export
def own(value: Any) -> rpc.RRef[Any]:
    return rpc.RRef(value)


@rpc.export
def pass_on(ref: rpc.RRef[Any], path: list[str]) -> rpc.RRef[Any]:
    return rpc.rpc_sync(path[0], pass_on, (ref, path[1:])) if path else ref


@rpc.export
def counts() -> tuple[int, int]:
    gc.collect()
    return _agent.current().agent.ref_counts()


def wait_until_nothing_is_left(size: int, but: tuple[int, int] = (0, 0)) -> None:
    """Releases are not waited for, so their effect comes a little later."""
    deadline = time.monotonic() + 30
    while any((left := rpc.rpc_sync(f"w{rank}", counts)) != but for rank in range(size)):
        assert time.monotonic() < deadline, left


def _basics(rank: int) -> None:
    if rank != 0:
        return
    ref = rpc.remote("w1", make, (torch.arange(3),))
    assert torch.equal(ref.to_here(), torch.arange(3))
    assert ref.confirmed_by_owner()
    assert not ref.is_owner()
    assert ref.owner() == rpc.get_worker_info("w1")
    assert "'w1'" in repr(ref)
    with pytest.raises(ValueError, match="to_here"):
        ref.local_value()
    assert torch.equal(rpc.rpc_sync("w2", read, (ref,)), torch.arange(3))  # to a third worker
    assert torch.equal(rpc.rpc_sync("w1", read, (ref,)), torch.arange(3))  # to its owner
    assert rpc.rpc_sync("w2", read_holder, (Holder(ref, "x"),))[1] == "x"  # in an object
    assert rpc.rpc_sync("w2", read, args=(), kwargs={"ref": rpc.RRef([1])}) == [1]
    returned = rpc.rpc_sync("w2", own, ("w2's",))
    assert returned.owner_name() == "w2"
    assert returned.to_here() == "w2's"
    around = rpc.rpc_sync("w2", pass_on, (ref, ["w1", "w0", "w2", "w1", "w2"]))
    assert torch.equal(around.to_here(), torch.arange(3))
    here = rpc.RRef({"a": 1})
    assert here.is_owner()
    assert here.local_value() is here.to_here()
    to_self = rpc.remote("w0", make, ([5],))
    assert to_self.to_here() == [5]
    slow: Any = rpc.remote("w1", make_slowly, (7,))
    assert slow.to_here() == 7
    assert rpc.rpc_sync("w0", read, (rpc.remote("w0", make_slowly, (8,)),)) == 8
    nested = rpc.remote("w1", make, ([ref, here],)).to_here()
    assert torch.equal(nested[0].to_here(), torch.arange(3))
    assert nested[1].local_value() == {"a": 1}
    del ref, returned, around, here, to_self, slow, nested
    wait_until_nothing_is_left(3)


def test_references_can_be_passed_around() -> None:
    run_workers(3, _basics)


def _proxies(rank: int) -> None:
    if rank != 0:
        return
    model = rpc.remote("w1", Model, (4,))
    assert model.rpc_sync().add(torch.ones(4)) == 4
    rpc.wait_all([model.rpc_async().add(torch.ones(4)) for _ in range(9)])
    assert torch.equal(model.rpc_sync().get(), torch.full((4,), 10.0))
    assert torch.equal(model.remote().get_slowly().to_here(), torch.full((4,), 10.0))
    assert model.rpc_sync().sum_at("w0") == 41
    for name in ("_secret", "__enter__"):
        with pytest.raises(AttributeError, match=name):
            getattr(model.rpc_sync(), name)
    with pytest.raises(AttributeError, match="missing"):
        model.rpc_sync().missing()
    with pytest.raises(TypeError, match="Model cannot be sent"):
        model.to_here()
    linear = rpc.remote("w1", torch.nn.Linear, (2, 3))
    assert linear.rpc_sync()(torch.ones(1, 2)).shape == (1, 3)
    table = rpc.remote("w1", make, ({"a": [5]},))
    assert table.rpc_sync()["a"] == [5]
    del model, linear, table
    wait_until_nothing_is_left(2)


def test_methods_of_a_remote_value() -> None:
    run_workers(2, _proxies)


def _failures(rank: int) -> None:
    if rank != 0:
        return
    with pytest.raises(ZeroDivisionError, match="no value"):
        rpc.remote("w1", fail).to_here()
    with pytest.raises(ZeroDivisionError, match="no value"):
        rpc.rpc_sync("w1", read, (rpc.remote("w1", fail),))
    with pytest.raises(ZeroDivisionError, match="no value"):
        rpc.remote("w0", fail).local_value()
    with pytest.raises(PermissionError, match="system"):
        rpc.remote("w1", os.system, ("true",)).to_here()
    with pytest.raises(muster.PeerLostError, match="nobody"):
        rpc.remote("nobody", make, (1,)).to_here()
    with pytest.raises(TypeError, match="lock"):
        rpc.remote("w1", make, (threading.Lock(),))
    with pytest.raises(ValueError, match="another worker"):
        rpc.rpc_sync("w1", "muster.ref.create", (77, 1, "x", (), {}))
    wait_until_nothing_is_left(2)


def test_errors_are_raised_by_to_here() -> None:
    run_workers(2, _failures)


_released = threading.Event()


@rpc.export
def hold() -> int:
    assert _released.wait(60)
    return 1


@rpc.export
def release() -> None:
    _released.set()


def _pending(rank: int) -> None:
    if rank != 0:
        return
    value = rpc.remote("w1", hold)
    with pytest.raises(muster.TimeoutError, match="no value after"):
        value.to_here(timeout=0.1)
    with pytest.raises(muster.TimeoutError, match="bit_length"):
        value.rpc_sync(timeout=0.1).bit_length()
    assert not value.confirmed_by_owner()
    rpc.rpc_sync("w1", release)
    assert value.to_here() == 1
    assert value.confirmed_by_owner()
    missing = rpc.remote("w1", os.system, ("true",))
    with pytest.raises(PermissionError):
        missing.to_here()


def test_a_wait_for_a_value_that_is_being_made_ends_at_its_timeout() -> None:
    run_workers(2, _pending)


def _stopped_owner(rank: int) -> None:
    if rank == 0:
        value = rpc.remote("w2", make, (1,))
        value.to_here()
        owner = rpc.rpc_sync("w2", os.getpid)
        os.kill(owner, signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{owner}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        try:
            with pytest.raises(muster.TimeoutError):
                rpc.rpc_async("w1", read, (value,), timeout=0.2)
        finally:
            os.kill(owner, signal.SIGCONT)
        assert rpc.rpc_sync("w1", read, (value,)) == 1


def test_a_call_does_not_wait_for_the_owner_of_a_reference_longer_than_its_timeout() -> None:
    run_workers(3, _stopped_owner, allow="posix:getpid")


def _unsafe_methods(rank: int, folder: str) -> None:
    if rank != 0:
        return
    path = rpc.remote("w1", pathlib.PosixPath, (folder,))
    with pytest.raises(PermissionError, match=r"PosixPath.iterdir.*rpc.allow\('pathlib:PosixPath'\)"):
        path.rpc_sync().iterdir()
    tensor = rpc.remote("w1", torch.zeros, (2,))
    for name in ("numpy", "untyped_storage"):
        with pytest.raises(PermissionError, match=rf"Tensor\.{name}"):
            getattr(tensor.rpc_sync(), name)()
    array = rpc.remote("w1", make, (np.zeros(2),))
    with pytest.raises(PermissionError, match=r"ndarray\.tofile"):
        array.rpc_sync().tofile(f"{folder}/written")
    assert not list(Path(folder).iterdir())
    assert array.rpc_sync().sum() == 0
    assert tensor.rpc_sync().add_(1).sum() == 2
    assert rpc.remote("w1", make, ({1: 2},)).rpc_sync().get(1) == 2
    with pytest.raises(PermissionError, match=r"Linear\.compile"):
        rpc.remote("w1", torch.nn.Linear, (2, 2)).rpc_sync().compile()
    assert rpc.remote("w1", make_adder, (1,)).rpc_sync()(2) == 3


def test_methods_of_a_remote_value_cannot_write_files(tmp_path: Path) -> None:
    run_workers(2, _unsafe_methods, str(tmp_path))


kept: list[Any] = []


@rpc.export
def keep(ref: rpc.RRef[Any]) -> None:
    kept.append(ref)


@rpc.export
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


LEASE = rpc.Options(lease=1.0, rpc_timeout=60)


def _dead_user(rank: int) -> None:
    if rank != 0:
        threading.Event().wait(60)
    ref = rpc.RRef(torch.ones(1000))
    rpc.rpc_sync("w1", keep, (ref,))
    other = rpc.rpc_sync("w1", own, (1,))
    del ref
    time.sleep(2.5)  # tidy: allow(sleep) leases end, unless they are renewed
    assert counts() == (1, 1), "w1 renews its lease"
    with pytest.raises(muster.PeerLostError):
        rpc.rpc_sync("w1", die)
    with pytest.raises(muster.PeerLostError, match="w1"):
        other.to_here(timeout=5)
    deadline = time.monotonic() + 30
    while counts()[0] != 0:
        assert time.monotonic() < deadline
    with pytest.raises(muster.Error):
        rpc.shutdown()
    rpc.init_rpc("again", store=torch.distributed.HashStore())


def test_a_dead_user_leaks_nothing() -> None:
    run_workers(2, _dead_user, lost=(1,), rpc_backend_options=LEASE)


@rpc.export
def play(seed: int, size: int, rounds: int) -> int:
    """Creates, passes, reads and drops references at random. Returns how many it read."""
    choose = random.Random(seed)
    mine: list[tuple[rpc.RRef[Any], int]] = []
    reads = 0
    for number in range(rounds):
        what = choose.random()
        to = f"w{choose.randrange(size)}"
        if what < 0.3 or not mine:
            mine.append((rpc.remote(to, make, ((seed, number),)), number))
        elif what < 0.6:
            mine.pop(choose.randrange(len(mine)))
        else:
            ref, expected = choose.choice(mine)
            assert rpc.rpc_sync(to, read, (ref,)) == (seed, expected)
            path = [f"w{choose.randrange(size)}" for _ in range(choose.randrange(3))]
            mine.append((rpc.rpc_sync(to, pass_on, (ref, path)), expected))
            assert mine[-1][0].to_here() == (seed, expected)
            reads += 2
    return reads


def _many(rank: int, size: int) -> int:
    if rank != 0:
        return 0
    players = [rpc.rpc_async(f"w{n % size}", play, (n, size, 150)) for n in range(2 * size)]
    reads = sum(rpc.wait_all(players))
    wait_until_nothing_is_left(size)
    return reads


def test_random_references_are_kept_and_dropped() -> None:
    reads = run_workers(4, _many, 4, rpc_backend_options=LEASE)
    assert reads[0] > 500
