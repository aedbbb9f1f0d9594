"""Tensors on a device. tests/torch/device_double stands for the device, and tests/nccl for NCCL.

`make gpu` runs them on a GPU, with the NCCL that torch brings.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import device_double
import pytest
import torch

PROGRAM = Path(__file__).with_name("device_program.py")
BOTH_WAYS = (
    "torchs_calls",
    "streams",
    "large",
    "two_devices",
    "ddp",
    "large_bucket",
    "sharded",
    "no_sync_and_join",
    "groups",
    "batches_of_messages",
    "graph_beside_copies",
    "left",
)


def run(function: str, library: str = "", ranks: int = 3, backend: str = "muster") -> subprocess.CompletedProcess[str]:
    job = ["muster", "run", "--nproc-per-node", str(ranks), "--shutdown-timeout", "60"]
    command = [*job, str(PROGRAM), function, backend]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "MUSTER_NCCL_LIBRARY": library}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


@pytest.fixture
def nccl(release_build: Path) -> str:
    return str(release_build / "tests/nccl/libfake_nccl.so") if device_double.IS_DOUBLE else "libnccl.so.2"


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> None:
    if device_double.IS_DOUBLE:
        return
    if torch.accelerator.device_count() < (2 if "two_devices" in request.node.name else 1):
        pytest.skip(f"not enough devices of {device_double.DEVICE}")


@pytest.mark.parametrize("function", [*BOTH_WAYS, "errors"])
def test_tensors_go_through_the_host(function: str, built_programs: Path) -> None:
    done = run(function)
    assert done.returncode == 0, done.stdout + done.stderr


def test_large_tensors_of_one_rank_go_through_the_host(built_programs: Path) -> None:
    done = run("large", ranks=1)
    assert done.returncode == 0, done.stdout + done.stderr


def test_tensors_go_over_the_backend_of_the_device(nccl: str, built_programs: Path) -> None:
    done = run("sharded", nccl, backend=device_double.MIXED)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("function", [*BOTH_WAYS, "graph", "nccl", "late", "stopped", "no_library"])
def test_tensors_go_over_nccl(function: str, nccl: str, built_programs: Path) -> None:
    done = run(function, nccl)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not device_double.IS_DOUBLE, reason="only the NCCL of the tests fails on demand")
@pytest.mark.parametrize(
    "function",
    ["kernel_that_hangs", "shrunk_while_a_kernel_hangs", "one_gpu_for_two_ranks", "abort_of_the_forming"],
)
def test_failures_of_nccl(function: str, nccl: str, built_programs: Path) -> None:
    done = run(function, nccl)
    assert done.returncode == 0, done.stdout + done.stderr


# Of a rank that runs the example on the device of the tests.
EXAMPLE = """
import runpy, sys, device_double
device_double.load()
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_the_example_goes_on_after_the_death_of_a_rank(root: Path, built_programs: Path, tmp_path: Path) -> None:
    job = ["muster", "run", "--nproc-per-node", "2", "--max-restarts", "1", "-c", EXAMPLE]
    example = [root / "examples/python/gpus.py", "--checkpoint", tmp_path, "--fail-at", "2"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parent)}
    done = subprocess.run([*job, *map(str, example)], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"begins after epoch (\d)", done.stdout) == ["0", "2"], done.stdout
    accuracy = re.search(r"epoch 4: accuracy ([\d.]+)%", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 90


@pytest.mark.skipif(not hasattr(torch.distributed, "_reconfigure"), reason="torch has it from 2.14 on")
@pytest.mark.parametrize("over_nccl", [False, True])
def test_the_members_of_a_group_change(over_nccl: bool, nccl: str, built_programs: Path) -> None:
    done = run("reconfigured", nccl if over_nccl else "")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("over_nccl", [False, True])
def test_ranks_go_on_after_the_death_of_one(over_nccl: bool, nccl: str, built_programs: Path) -> None:
    done = run("killed", nccl if over_nccl else "")
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert all(f"rank {rank} goes on" in output for rank in (0, 2)), output
