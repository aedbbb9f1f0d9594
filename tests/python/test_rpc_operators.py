"""muster.rpc: operators of torch that workers call at each other."""

from __future__ import annotations

import ctypes
import os
import select
import struct
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from rpc_workers import run_workers

import muster
from muster import rpc
from muster.rpc import _functions

forks.preload("muster.rpc")

ops: Any = torch.ops.aten
own: Any = torch.ops.rpc_test

library = torch.library.Library("rpc_test", "FRAGMENT")
library.define("in_python(Tensor x, str text) -> Tensor")


@torch.library.impl(library, "in_python", "CompositeExplicitAutograd")
def _in_python(x: torch.Tensor, text: str) -> torch.Tensor:
    if text == "fail":
        raise KeyError("it failed \ud800")  # which UTF-8 cannot hold
    return x * len(text)


_OPERATORS = (
    *(ops.mul.Tensor, ops.add.Tensor, ops.einsum.default, ops.max.dim, ops.split_with_sizes.default, ops.clamp.default),
    *(ops.bernoulli.default, own.in_python),
)
for _operator in _OPERATORS:
    rpc.export(_operator)
rpc.export(name="stacked")(ops.stack.default)


def _check_results(other: str) -> None:
    three = torch.full((2,), 3.0)
    assert torch.equal(rpc.rpc_sync(other, ops.mul.Tensor, (three, three)), three * three)
    assert torch.equal(rpc.rpc_sync(other, "aten::add.Tensor", (three,), {"other": three, "alpha": 2}), three * 3)
    assert torch.equal(rpc.rpc_sync(other, "aten::add.Tensor", (three, three), {"alpha": 0.5}), three * 1.5)
    assert torch.equal(rpc.rpc_sync(other, "stacked", ([three, three], 1)), torch.stack([three, three], 1))
    assert torch.equal(rpc.rpc_sync(other, ops.einsum.default, ("i,i->i", (three, three))), three * three)
    assert torch.equal(rpc.rpc_sync(other, ops.clamp.default, (three, None, 2)), three - 1)
    largest = rpc.rpc_sync(other, ops.max.dim, (torch.tensor([[1, 5, 2]]), 1, True))
    assert isinstance(largest, tuple) and [each.tolist() for each in largest] == [[[5]], [[1]]]
    for sizes in ([1, 2], torch.Size([1, 2])):
        parts = rpc.rpc_sync(other, ops.split_with_sizes.default, (torch.arange(3),), {"split_sizes": sizes})
        assert [each.tolist() for each in parts] == [[0], [1, 2]]
    assert torch.equal(rpc.rpc_sync(other, ops.mul.Tensor, (torch.nn.Parameter(three), three)), three * three)
    assert torch.equal(rpc.rpc_sync(other, own.in_python, (three, "twice")), three * 5)
    assert torch.equal(rpc.remote(other, ops.mul.Tensor, (three, three)).to_here(), three * three)


def _check_errors(other: str) -> None:
    three = torch.full((2,), 3.0)
    for name, args, kwargs, kind, text in (
        ("aten::mul.Tensor", (three,), {}, muster.ArgumentError, "needs the argument other"),
        ("aten::add.Tensor", (three, three, 2), {}, muster.ArgumentError, "takes 2 arguments by position, got 3"),
        (
            "aten::mul.Tensor",
            (three, "x"),
            {},
            muster.ArgumentError,
            r"expected a tensor, got a string \(argument other",
        ),
        ("aten::mul.Tensor", (three,), {"self": three}, muster.ArgumentError, "got the argument self twice"),
        ("aten::mul.Tensor", (three,), {"others": three}, muster.ArgumentError, "has no argument others"),
        ("aten::clamp", (three, "x"), {}, muster.ArgumentError, r"expected a float, got a string \(argument min"),
        ("stacked", (three,), {}, muster.ArgumentError, r"expected a list, got a tensor \(argument tensors"),
        ("aten::split_with_sizes", (three, [1, "x"]), {}, muster.ArgumentError, r"got a string \(argument split_sizes"),
        (
            "aten::bernoulli",
            (three,),
            {"generator": 1},
            muster.ArgumentError,
            "a value of type Generator cannot travel",
        ),
        ("aten::mul.Tensor", (three, torch.ones(5)), {}, RuntimeError, "must match the size"),
        ("rpc_test::in_python", (three, "fail"), {}, KeyError, r"it failed .*ud800"),
        ("aten::sub.Tensor", (three, three), {}, PermissionError, "other workers must not call the operator"),
    ):
        with pytest.raises(kind, match=text):
            rpc.rpc_sync(other, name, args, kwargs)


def _call(rank: int) -> None:
    _check_results(f"w{1 - rank}")
    _check_errors(f"w{1 - rank}")


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_operators_take_what_their_schema_says(allow_pickle: bool) -> None:
    run_workers(2, _call, allow_pickle=allow_pickle)


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
    with pytest.raises(RuntimeError, match=r"aten::format"):  # only TorchScript can call it
        rpc.export(ops.format)
    assert rpc.export(ops.mul.Tensor) is ops.mul.Tensor
    assert _functions.name_of(ops.mul.Tensor) == "aten::mul.Tensor"
    assert _functions.name_of(own.in_python) == "rpc_test::in_python"
    assert "rpc_test::in_python" not in _functions.operators()
    assert _functions.operators()["stacked"] == "aten::stack"
