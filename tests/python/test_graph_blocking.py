"""backend="muster": an all_reduce whose wait comes next is one call, without a Work."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch._inductor.utils import run_and_get_code

TIMEOUT = 400  # seconds: Inductor calls a C++ compiler, and the machine may be loaded
OPERATORS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)


def chained(x: torch.Tensor, groups: list[Any]) -> torch.Tensor:
    """No computation can run beside a collective."""
    for group in groups:
        for op in OPERATORS:
            x = torch.cos(x)
            dist.all_reduce(x, op, group)
    return x


def compile_chain(rank: int, cpp_wrapper: bool) -> None:
    torch.set_num_threads(1)
    groups = [dist.group.WORLD, dist.new_group([1, 0]), dist.new_group([0, 1], backend="gloo")]
    x = torch.arange(6.0).view(2, 3) + rank
    with torch._inductor.config.patch(cpp_wrapper=cpp_wrapper):
        result, codes = run_and_get_code(torch.compile(chained, backend="muster", fullgraph=True), x, groups)
    torch.testing.assert_close(result, chained(x, groups))
    code = "\n".join(codes)
    assert code.count("muster::all_reduce_address" if cpp_wrapper else "muster.all_reduce_.default(") == 12
    assert "wait_tensor" not in code.replace("Original ATen: [_c10d_functional.wait_tensor", "")


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_a_wait_that_comes_next_needs_no_work(cpp_wrapper: bool, tmp_path: Path) -> None:
    run_ranks(2, compile_chain, cpp_wrapper, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, timeout=TIMEOUT)


def overlapped(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    work: Any = dist.all_reduce(y, async_op=True)
    product = x @ x.T
    work.wait()
    return y.sum() + product.sum()


def compile_overlap(rank: int) -> None:
    torch.set_num_threads(1)
    x = torch.ones(4, 4) + rank
    result, codes = run_and_get_code(torch.compile(overlapped, backend="muster", fullgraph=True), x)
    assert result == overlapped(x)
    assert "muster.all_reduce_" not in codes[0] and "wait_tensor.default(" in codes[0]


def test_an_all_reduce_beside_computation_stays_asynchronous(tmp_path: Path) -> None:
    run_ranks(2, compile_overlap, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, timeout=TIMEOUT)


def profile_chain(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    compiled = torch.compile(chained, backend="muster", fullgraph=True)
    x, groups = torch.ones(2), [dist.group.WORLD]
    compiled(x, groups)
    with torch.profiler.profile() as profile:
        compiled(x, groups)
    if rank == 0:
        profile.export_chrome_trace(file)


def test_a_plan_with_blocking_calls_is_measured(muster: str, tmp_path: Path) -> None:
    file = str(tmp_path / "profile.json")
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "MUSTER_GRAPH_PLANS": str(tmp_path / "plans")}
    run_ranks(2, profile_chain, file, env=env, timeout=TIMEOUT)
    (plan,) = (tmp_path / "plans").iterdir()
    done = subprocess.run([muster, "explain", "graph", plan, "--measured", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^all_reduce_ +test_graph_blocking.py:\d+ ", done.stdout, re.MULTILINE)) == len(OPERATORS)
