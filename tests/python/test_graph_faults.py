"""Compiled graphs whose shapes change, whose group ends or is formed again, and whose ranks die."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import muster.errors
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

TIMEOUT = 400  # seconds: Inductor calls a C++ compiler, and the machine may be loaded


def step(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    work: Any = dist.all_reduce(y, async_op=True)
    product = x @ x.T
    work.wait()
    work.wait()  # a second wait does nothing
    return y.sum() + product.sum()


def change_shapes(rank: int) -> None:
    torch.set_num_threads(1)
    compiled = torch.compile(step, backend="muster", fullgraph=True, dynamic=True)
    for rows in (4, 6, 9):
        x = torch.ones(rows, 3) + rank
        with torch._dynamo.config.patch(error_on_recompile=rows > 4):
            assert compiled(x) == step(x)


def test_one_graph_serves_several_shapes() -> None:
    run_ranks(2, change_shapes, timeout=TIMEOUT)


def fail_to_compile(rank: int) -> None:
    torch.set_num_threads(1)

    def fails(*arguments: Any, **named: Any) -> Any:
        raise ValueError("no code for this")

    x = torch.ones(4, 3) + rank
    with mock.patch("torch._inductor.compile_fx.compile_fx_inner", fails):
        compiled = torch.compile(step, backend="muster")
        with pytest.raises(Exception, match=r"(?s)no code for this.*should run eagerly: set TORCH_COMPILE_DISABLE=1"):
            compiled(x)
    with torch.compiler.set_stance("force_eager"):
        assert compiled(x) == step(x)


def test_a_graph_that_cannot_be_compiled_says_how_to_run_the_model() -> None:
    run_ranks(2, fail_to_compile, timeout=TIMEOUT)


def change_a_number(rank: int) -> None:
    torch.set_num_threads(1)

    def limited(x: torch.Tensor, limit: float) -> torch.Tensor:
        y = x.clamp(max=limit)
        dist.all_reduce(y)
        return y * limit

    compiled = torch.compile(limited, backend="muster")
    for limit in (0.1, 0.2, 0.3):  # the second one makes it dynamic, which Dynamo begins by an exception
        torch.testing.assert_close(compiled(torch.ones(4), limit), torch.full((4,), 2 * limit**2))


def test_a_number_may_change() -> None:
    run_ranks(2, change_a_number, timeout=TIMEOUT)


def form_again(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    x = torch.ones(4, 4) + rank
    compiled = torch.compile(step, backend="muster", fullgraph=True)
    expected = step(x)
    assert compiled(x) == expected
    dist.destroy_process_group()
    with pytest.raises(Exception, match="the default process group has not been initialized"):
        compiled(x)
    dist.init_process_group("muster", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    assert compiled(x) == expected


def test_a_graph_runs_over_a_group_that_is_formed_again(tmp_path: Any) -> None:
    run_ranks(2, form_again, str(tmp_path / "store"), timeout=TIMEOUT)


def blocking_step(x: torch.Tensor) -> torch.Tensor:
    """Nothing can run beside the all_reduce."""
    y = x * 2
    dist.all_reduce(y)
    return y.sum()


def die(rank: int, function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    torch.set_num_threads(1)
    compiled = torch.compile(function, backend="muster", fullgraph=True)
    x = torch.ones(4, 4)
    compiled(x)
    if rank == 1:
        os._exit(3)
    # From 2.15 on, torch turns errors of compiled code into the class that muster's errors have in common.
    keeps_class = torch.torch_version.TorchVersion(torch.__version__) < "2.15"
    expected = muster.errors.PeerLostError if keeps_class else dist.DistBackendError
    with pytest.raises(expected, match=r"rank 1 .*\(during all_reduce") as error:
        for _ in range(1000):
            compiled(x)
    return str(error.value)


@pytest.mark.parametrize("function", [step, blocking_step])
def test_a_rank_that_dies_is_named(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    run_ranks(2, die, function, lost=(1,), timeout=TIMEOUT)
