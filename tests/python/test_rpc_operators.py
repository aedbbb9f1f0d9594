"""muster.rpc: operators of torch that workers call at each other."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from rpc_workers import run_workers

from muster import rpc
from muster.rpc import _functions

forks.preload("muster.rpc")

ops: Any = torch.ops.aten
own: Any = torch.ops.rpc_test

library = torch.library.Library("rpc_test", "FRAGMENT")
library.define(
    "kinds(Tensor[] x, int[] y, (int, str) pair, Dict(str, float) d, str? s=None, Scalar n=2)"
    " -> (Tensor, Dict(str, float), str)"
)
library.define("fails(Tensor x) -> Tensor")
library.define("draw(Generator? generator=None) -> int")


@torch.library.impl(library, "kinds", "CompositeExplicitAutograd")
def _kinds(x: Any, y: Any, pair: Any, d: Any, s: Any = None, n: Any = 2) -> Any:
    return sum(x) * sum(y) * n, {**d, pair[1]: pair[0]}, str(s)


@torch.library.impl(library, "fails", "CompositeExplicitAutograd")
def _fails(x: Any) -> Any:
    raise KeyError("it failed")


@torch.library.impl(library, "draw", "CompositeExplicitAutograd")
def _draw(generator: Any = None) -> Any:
    return 7


for _operator in (ops.mul.Tensor, ops.add.Tensor, own.kinds, own.draw):
    rpc.export(_operator)
rpc.export(own.fails)

_has_exported = threading.Event()


@rpc.export
def wait_for_exports() -> bool:
    return _has_exported.wait(60)


def _call(rank: int) -> None:
    rpc.export(name="stacked")(ops.stack.default)  # after init_rpc()
    _has_exported.set()
    other = f"w{1 - rank}"
    assert rpc.rpc_sync(other, wait_for_exports)
    three = torch.full((2,), 3.0)
    assert torch.equal(rpc.rpc_sync(other, ops.mul.Tensor, (three, three)), three * three)
    assert torch.equal(rpc.rpc_sync(other, "aten::add.Tensor", (three,), {"other": three, "alpha": 2}), three * 3)
    assert torch.equal(rpc.rpc_sync(other, "stacked", ([three, three], 1)), torch.stack([three, three], 1))
    made = rpc.rpc_sync(other, own.kinds, ((three, three), [1, 2], (4, "four"), {"one": 1}))
    assert torch.equal(made[0], three * 12) and made[1:] == ({"one": 1.0, "four": 4.0}, "None")
    made = rpc.rpc_sync(other, own.kinds, ([three], (1,), (4, "x"), {}, "text"), {"n": 0.5})
    assert torch.equal(made[0], three / 2) and made[2] == "text"
    assert rpc.rpc_sync(other, own.draw) == 7
    assert torch.equal(rpc.remote(other, ops.mul.Tensor, (three, three)).to_here(), three * three)
    for name, args, kwargs, kind, text in (
        ("aten::mul.Tensor", (three,), {}, RuntimeError, "needs the argument other"),
        ("aten::mul.Tensor", (three, three, three), {}, RuntimeError, "takes 2 arguments, got 3"),
        ("aten::mul.Tensor", (three, "x"), {}, RuntimeError, r"expected a tensor, got a string \(argument other\)"),
        ("aten::mul.Tensor", (three,), {"self": three}, RuntimeError, "got the argument self twice"),
        ("aten::mul.Tensor", (three,), {"others": three}, RuntimeError, "has no argument others"),
        ("aten::mul.Tensor", (three, torch.ones(5)), {}, RuntimeError, "must match the size"),
        (
            "rpc_test::kinds",
            ([three], [1, "x"], (4, "x"), {}),
            {},
            RuntimeError,
            r"expected an int, got a string \(argument y\)",
        ),
        ("rpc_test::kinds", ([three], [1], (4,), {}), {}, RuntimeError, r"expected 2 values, got 1 \(argument pair\)"),
        ("rpc_test::draw", (1,), {}, RuntimeError, r"its type Generator cannot travel \(argument generator\)"),
        ("rpc_test::fails", (three,), {}, KeyError, "it failed"),
        ("aten::sub.Tensor", (three, three), {}, PermissionError, "other workers must not call the operator"),
    ):
        with pytest.raises(kind, match=text):
            rpc.rpc_sync(other, name, args, kwargs)


def test_operators_take_what_their_schema_says() -> None:
    run_workers(2, _call)


def _gradients(rank: int) -> None:
    x = torch.full((2,), 3.0, requires_grad=True)
    with rpc.autograd.context() as context:
        rpc.autograd.backward(context, [rpc.rpc_sync(f"w{1 - rank}", ops.mul.Tensor, (x, x)).sum()])
        assert torch.equal(rpc.autograd.get_gradients(context)[x], 2 * x)


def test_gradients_flow_through_operators() -> None:
    run_workers(2, _gradients)


def _hold_the_gil(rank: int, folder: str) -> None:
    """w0 holds its GIL until w1 has got the answer of a call."""
    with open(f"{folder}/held", "rb+", 0) as held, open(f"{folder}/answered", "rb+", 0) as answered:
        if rank == 1:
            held.read(1)
            assert torch.equal(rpc.rpc_sync("w0", ops.mul.Tensor, (torch.ones(2), torch.ones(2))), torch.ones(2))
            answered.write(b"x")
            return
        libc = ctypes.PyDLL(None)  # its functions keep the GIL
        wanted = ctypes.create_string_buffer(struct.pack("ihh", answered.fileno(), select.POLLIN, 0))
        libc.write(held.fileno(), b"x", 1)
        assert libc.poll(wanted, 1, 30_000) == 1, "the call needed the GIL"


def test_calls_of_operators_need_no_gil(tmp_path: Path) -> None:
    for name in ("held", "answered"):
        os.mkfifo(tmp_path / name)
    run_workers(2, _hold_the_gil, str(tmp_path))


def test_what_can_be_exported() -> None:
    with pytest.raises(ValueError, match=r"has the overloads Tensor, Scalar.*name one, such as aten.mul.Tensor"):
        rpc.export(ops.mul)
    assert rpc.export(ops.relu.default) is ops.relu.default
    assert _functions.name_of(ops.relu.default) == "aten::relu"
    assert _functions.name_of(own.fails) == "rpc_test::fails"
