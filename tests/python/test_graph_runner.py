"""muster.graph.package(), and tests/torch/graph_runner.cpp, which runs what it makes without Python."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import muster.errors
import muster.graph
import pytest
import torch
import torch._inductor.package
import torch.distributed as dist
from muster.graph._plan.costs import Costs, LinkCosts
from ranks import run_ranks
from torch import Tensor, nn

TIMEOUT = 400  # seconds: Inductor calls a C++ compiler, and the machine may be loaded
SIDE, LAYERS = 128, 3


class Perceptron(nn.Module):
    """Tensor-parallel: each rank has a part of the hidden units."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        hidden = 4 * SIDE // dist.get_world_size()
        self.up = nn.ModuleList(nn.Linear(SIDE, hidden, bias=False) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(hidden, SIDE, bias=False) for _ in range(LAYERS))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            y = down(torch.relu(up(x)))
            dist.all_reduce(y, group=self.group)
            x = x + y
        return x


def make_packages(rank: int, folder: str) -> float:
    """No rank collects its files before all ranks have written theirs: they must not write the same ones."""
    package_aoti = torch._inductor.package.package_aoti

    def collect(*args: Any) -> Any:
        dist.barrier()
        return package_aoti(*args)

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model, x = Perceptron(), torch.ones(2, SIDE)
    with torch.no_grad(), mock.patch("torch._inductor.package.package_aoti", collect):
        expected = model(x)
        path = muster.graph.package(model, (x,), f"{folder}/rank{rank}.pt2")
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), expected)
    return float(expected.double().sum())


class GatherRows(nn.Module):
    """Multiplies the rows of all ranks, and returns this rank's part of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.new_empty(dist.get_world_size() * len(x), 256)
        dist.all_gather_into_tensor(rows, x)
        part = torch.empty_like(x)
        dist.reduce_scatter_tensor(part, rows @ self.weight)
        dist.all_reduce(part)  # blocks
        return part


def run_from_python(rank: int, folder: str) -> None:
    """The message holds a tensor of Python, and the GIL is not released for a package. In chunks, so that several
    messages are under way.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = GatherRows(), torch.randn(384, 256)
    assert dist.group.WORLD is not None
    rates = Costs(1e9, 1e12, {dist.group.WORLD.group_name: LinkCosts(1e-6, 1e7, 2)})
    with torch.no_grad(), mock.patch("muster.graph._backend.costs_of", return_value=rates):
        path = muster.graph.package(model, (x,), f"{folder}/rank{rank}.pt2")
        with zipfile.ZipFile(path) as archive:
            code = "".join(archive.read(name).decode() for name in archive.namelist() if name.endswith(".cpp"))
        assert all(f'"muster::{name}"' in code for name in ("all_gather_chunks", "chunks_matmul"))
        assert "proxy_executor_call_function" not in code
        compiled = torch._inductor.aoti_load_package(path)
        for _ in range(20):
            torch.testing.assert_close(compiled(x), model(x))


def test_a_package_that_python_runs_may_send_its_input(tmp_path: Path) -> None:
    run_ranks(2, run_from_python, str(tmp_path), timeout=TIMEOUT)


def run_packages(muster: str, program: Path, folder: Path, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [muster, "run", "--nproc-per-node", str(ranks), "--no-python", str(program), str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)


def test_a_program_without_python_runs_a_package(muster: str, release_build: Path, tmp_path: Path) -> None:
    expected = run_ranks(2, make_packages, str(tmp_path), timeout=TIMEOUT)
    program = release_build / "tests/torch/graph_runner"
    done = run_packages(muster, program, tmp_path, 2, "2", str(SIDE))
    assert done.returncode == 0, done.stderr
    sums = [float(each) for each in re.findall(r"sum (\S+),", done.stdout)]
    assert sums == pytest.approx(expected, rel=1e-4)

    (tmp_path / "rank2.pt2").write_bytes((tmp_path / "rank1.pt2").read_bytes())
    for ranks, words, complaint in (
        (3, ("2", str(SIDE)), 'is compiled for rank 0 of 2 in group "world", and this is rank 0 of 3'),
        (2, ("2", str(SIDE), "other"), 'needs a group with the name "world"'),
    ):
        done = run_packages(muster, program, tmp_path, ranks, *words)
        assert done.returncode != 0
        assert complaint in done.stdout + done.stderr


def test_a_package_must_exist(muster: str, release_build: Path, tmp_path: Path) -> None:
    done = run_packages(muster, release_build / "tests/torch/graph_runner", tmp_path, 2, "2", "2")
    assert done.returncode != 0
    assert f"there is no file {tmp_path}/rank" in done.stdout + done.stderr


def refuse(rank: int, folder: str) -> None:
    group = dist.new_group([0, 1])
    x = torch.ones(2, SIDE)
    with pytest.raises(ValueError, match=r"the model uses a group of ranks \[0, 1\], which `groups` does not name"):
        muster.graph.package(Perceptron(group), (x,), f"{folder}/a.pt2")
    with pytest.raises(ValueError, match="a group's name must be one word, not 'a b'"):
        muster.graph.package(Perceptron(), (x,), f"{folder}/a.pt2", {"a b": dist.group.WORLD})


def test_a_group_without_a_name_is_refused(tmp_path: Path) -> None:
    run_ranks(2, refuse, str(tmp_path), timeout=TIMEOUT)


class Reduction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            dist.all_reduce(x)
        else:
            dist.broadcast(x, 0)
        return x


def package_other_calls(rank: int, folder: str) -> None:
    with pytest.raises(muster.errors.MismatchError, match=r"is all_reduce .* at rank 0, and broadcast .* at rank 1"):
        muster.graph.package(Reduction(), (torch.ones(2),), f"{folder}/rank{rank}.pt2")


def test_ranks_that_package_other_collectives_get_an_error(tmp_path: Path) -> None:
    run_ranks(2, package_other_calls, str(tmp_path), timeout=TIMEOUT)
