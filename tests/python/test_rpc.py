"""muster.rpc: calls between Python processes."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import os
import pickle
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import forks
import numpy as np
import pytest
import torch
from rpc_workers import run_workers

from muster import rpc
from muster.rpc import _functions, _pickling

forks.preload("muster.rpc")


@rpc.export
@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    labels: list[int]


@rpc.export
class Pair(NamedTuple):
    first: Any
    second: Any


@rpc.export
class OwnError(Exception):
    pass


class Secret:
    pass


@rpc.export
def echo(*values: Any, **named: Any) -> Any:
    return (values, named)


@rpc.export
def first_of(value: Any) -> Any:
    return value


@rpc.export
def fail(kind: str) -> None:
    if kind == "own":
        raise OwnError("mine")
    if kind == "key":
        raise KeyError("gone")
    if kind == "exit":
        sys.exit(3)
    raise Secret  # type: ignore[misc]


# ---- values


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if a.layout != torch.strided:
            return type(a) is type(b) and a.layout == b.layout and torch.equal(a.to_dense(), b.to_dense())
        alike = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        return alike and bits(a.detach()) == bits(b.detach())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Batch):
        return same(a.inputs, b.inputs) and a.labels == b.labels
    if isinstance(a, (list, tuple, collections.deque)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and same(list(a.items()), list(b.items()))
    return type(a) is type(b) and bool(a == b)


VALUES = [
    *(
        None,
        True,
        False,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        2**63,
        -(10**40),
        1.5,
        float("inf"),
        "",
        "h\xe9\U0001f600\0",
        b"\0\xff",
    ),
    *(
        [],
        (),
        {},
        [1, [2.0, ("x", {"k": [None]})]],
        {1: "a", "b": 2, (1, 2): 3},
        {1, 2},
        frozenset("ab"),
        1 + 2j,
        slice(1, 2),
    ),
    *(Pair(1, torch.ones(2)), collections.OrderedDict(a=1), collections.deque([1, 2]), bytearray(b"xy"), range(3)),
    *(
        collections.Counter("ab"),
        collections.defaultdict(int, a=1),
        Path("a/b"),
        decimal.Decimal("1.50"),
        uuid.UUID(int=7),
    ),
    *(torch.float32, torch.Size([2, 3]), torch.device("cpu"), ValueError("x").args, Batch),
    *(torch.zeros(()), torch.zeros(0), torch.zeros(0, 3), torch.arange(12).view(3, 4).t(), torch.arange(10)[::3]),
    *(
        torch.ones(3, requires_grad=True),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(2)),
    ),
    *(torch.arange(5 << 18, dtype=torch.float32), torch.eye(3).to_sparse(), np.arange(3.0), np.float64(2.5)),
    *(
        Batch(torch.rand(4, 4), [1, 2]),
        [torch.full((1,), float(n)) for n in range(300)],
        {"deep": Batch(torch.ones(1), [])},
    ),
    *(
        torch.tensor([1, 0], dtype=kind)
        for kind in (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float8_e5m2)
    ),
]


def _values(rank: int) -> int:
    if rank == 0:
        for value in VALUES:
            returned = rpc.rpc_sync("w1", first_of, (value,))
            assert same(value, returned), f"{value!r} came back as {returned!r}"
        assert rpc.rpc_sync("w1", echo, (1, "a"), {"b": torch.ones(1)}) == ((1, "a"), {"b": torch.ones(1)})
        deep: list[Any] = []
        for _ in range(200):  # deeper than the native format
            deep = [deep]
        assert rpc.rpc_sync("w1", first_of, (deep,)) == deep
        itself: list[Any] = []
        itself.append(itself)
        returned = rpc.rpc_sync("w1", first_of, (itself,))
        while returned[0] is not returned:
            returned = returned[0]
        mine = torch.zeros(1 << 20)
        rpc.rpc_sync("w1", first_of, (mine,)).add_(1)  # results and arguments are copies
        assert not mine.any()
    return len(VALUES)


def test_values_come_back_as_they_were() -> None:
    assert run_workers(2, _values) == [len(VALUES)] * 2


def _many_sizes(rank: int) -> None:
    if rank != 0:
        return
    generator = torch.Generator().manual_seed(7)
    for _ in range(40):
        count = int(torch.randint(1, 40, (), generator=generator))
        sizes = (
            (torch.rand(count, generator=generator) * 12).exp2().mul(torch.randint(0, 9, (count,), generator=generator))
        )
        tensors = [torch.rand(int(size), generator=generator) for size in sizes]
        futures = [rpc.rpc_async("w1", first_of, (tensors,)) for _ in range(3)]
        assert all(same(tensors, each) for each in rpc.wait_all(futures))


@pytest.mark.parametrize("transports", ["shm,tcp", "unix", "tcp"])
def test_tensors_of_many_sizes(transports: str) -> None:
    run_workers(2, _many_sizes, rpc_backend_options=rpc.Options(transports=transports))


# ---- what may be called


def _refused(rank: int) -> None:
    if rank == 0:
        function: Any
        for function, kind in (
            (os.system, PermissionError),
            (eval, PermissionError),
            (torch.load, PermissionError),
            (torch.from_file, LookupError),
            ("torch:from_file", PermissionError),
            (Secret, PermissionError),
            (pickle.loads, PermissionError),
            ("unknown", LookupError),
            ("not_imported:f", LookupError),
            (f"{__name__}:missing", LookupError),
            (f"{__name__}:echo.__globals__", LookupError),
            (f"{__name__}:os.system", LookupError),
            ("builtins:getattr", PermissionError),
            ("torch:_C", PermissionError),
            ("torch:nn.Module", LookupError),
            ("torch.nn.functional:relu", PermissionError),
        ):
            with pytest.raises(kind) as raised:
                rpc.rpc_sync("w1", function, ("true",))
            assert "w1" in str(raised.value.__cause__), "the error names the worker"
        for function in (lambda: 1, Batch(torch.ones(1), []).__repr__):
            with pytest.raises(ValueError, match="allow_pickle"):
                rpc.rpc_sync("w1", function)
        assert torch.equal(rpc.rpc_sync("w1", torch.add, (torch.ones(2), 1)), torch.full((2,), 2.0))
        assert isinstance(rpc.rpc_sync("w1", torch.nn.Linear, (1, 1)), torch.nn.Linear)


def test_only_functions_that_the_program_offers_can_be_called() -> None:
    run_workers(2, _refused, allow=["torch.nn.modules"])


def _system_pickle(value: object, tensors: list[torch.Tensor]) -> bytes:
    return b"cos\nsystem\n(S'exit 3'\ntR."


def _send_bad_pickles(rank: int) -> None:
    if rank == 0:
        for pickled in (_system_pickle, lambda value, tensors: b"\x80\x05garbage", lambda value, tensors: b""):
            monkey: Any = _pickling
            monkey.dumps = pickled
            with pytest.raises((PermissionError, pickle.UnpicklingError, EOFError, RuntimeError)):
                rpc.rpc_sync("w1", first_of, ({1, 2},))
        assert rpc.rpc_sync("w1", first_of, (5,)) == 5


def test_a_pickle_that_names_another_function_is_refused() -> None:
    run_workers(2, _send_bad_pickles)


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def next(self) -> int:
        return self.count + 1


def _pickled_calls(rank: int) -> None:
    if rank == 0:
        assert rpc.rpc_sync("w1", Counter(4).next) == 5
        assert rpc.rpc_sync("w1", os.getppid) == os.getppid()
        assert rpc.rpc_sync("w1", Counter, (4,)).next() == 5


def test_allow_pickle_lets_everything_travel() -> None:
    run_workers(2, _pickled_calls, allow_pickle=True)


def test_allow_pickle_is_logged() -> None:
    program = """
import torch.distributed as dist
from muster import rpc
rpc.init_rpc("careless", world_size=0, store=dist.HashStore(), allow_pickle=True)
rpc.shutdown()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    sentence = "allow_pickle=True: each worker of this job can run any code in worker 'careless'"
    assert done.stderr.count(sentence) == 1, done.stderr


def test_names_of_functions() -> None:
    assert _functions.name_of(torch.add) == "torch:add"
    assert _functions.name_of(echo) == f"{__name__}:echo"
    assert _functions.name_of(Batch.__init__) == f"{__name__}:Batch.__init__"
    assert _functions.name_of(lambda: 1) is None
    assert _functions.name_of(Counter(1).next) is None
    with pytest.raises(ValueError, match="colon"):
        rpc.export(name="a:b")(Counter)
    rpc.export(name="count once")(Counter)
    with pytest.raises(ValueError, match="count once"):
        rpc.export(name="count once")(Secret)


# ---- exceptions


def _exceptions(rank: int) -> None:
    if rank == 0:
        with pytest.raises(OwnError, match="mine") as own:
            rpc.rpc_sync("w1", fail, ("own",))
        assert "in fail" in str(own.value.__cause__)
        with pytest.raises(KeyError) as key:
            rpc.rpc_sync("w1", fail, ("key",))
        assert key.value.args == ("gone",)
        with pytest.raises(TypeError, match="BaseException"):
            rpc.rpc_sync("w1", fail, ("other",))
        with pytest.raises(RuntimeError, match="SystemExit: 3"):  # does not end the caller
            rpc.rpc_sync("w1", fail, ("exit",))
        with pytest.raises(TypeError, match="unexpected keyword"):
            rpc.rpc_sync("w1", first_of, (), {"wrong": 1})
        with pytest.raises(TypeError, match="lock"):  # cannot be pickled here
            rpc.rpc_sync("w1", first_of, (threading.Lock(),))
        with pytest.raises(TypeError, match="lock"):  # nor there
            rpc.rpc_sync("w1", make_lock)
        with pytest.raises(NotImplementedError, match="meta"):
            rpc.rpc_sync("w1", first_of, (torch.ones(1, device="meta"),))
        wrong: Any
        for wrong in (1, None):
            with pytest.raises(TypeError, match=f"not by {wrong}"):
                rpc.rpc_sync(wrong, first_of, (1,))
        for wrong in (5, "abc", torch.ones(2)):
            with pytest.raises(TypeError, match="args must be a tuple"):
                rpc.remote("w1", first_of, wrong)
        with pytest.raises(ValueError, match="negative"):
            rpc.rpc_sync("w1", first_of, (1,), timeout=-3)
        assert rpc.rpc_sync("w1", own_info) == rpc.get_worker_info("w1")
        for _ in range(2):  # a future may be asked again
            failed = rpc.rpc_async("w1", fail, ("own",))
            with pytest.raises(OwnError):
                failed.wait()


@rpc.export
def own_info() -> rpc.WorkerInfo:
    return rpc.get_worker_info()


@rpc.export
def make_lock() -> Any:
    return threading.Lock()


def test_exceptions_reach_the_caller() -> None:
    run_workers(2, _exceptions)


def test_an_exception_that_is_raised_again_has_the_same_traceback() -> None:
    failed: rpc.Future[None] = rpc.Future()
    failed.set_exception(OwnError("own"))
    lengths = []
    for _ in range(3):
        with pytest.raises(OwnError) as raised:
            failed.wait()
        lengths.append(len(raised.traceback))
    assert lengths == lengths[:1] * 3
