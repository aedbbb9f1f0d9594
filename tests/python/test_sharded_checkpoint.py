"""Tests that C++ and torch.distributed.checkpoint read each other's sharded checkpoints."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

ROWS, COLUMNS, STEP = 7, 5, 10**12


def tensors() -> dict[str, Any]:
    """What tests/torch/sharded_worker.cpp saves."""
    return {
        "table": torch.arange(ROWS * COLUMNS, dtype=torch.float64).view(ROWS, COLUMNS),
        "note": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "bias": torch.tensor(3, dtype=torch.int32),
        "layer": {"weight": torch.full((3, 2), 0.25), "bias": torch.zeros(3)},
        "step": STEP,
    }


SAVE = """
import sys
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
sys.path.insert(0, sys.argv[2])
from test_sharded_checkpoint import tensors

dist.init_process_group("muster")
state = tensors()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
state["table"] = distribute_tensor(state["table"], mesh, [Shard(0)])
state["layer"]["weight"] = state["layer"]["weight"].t().contiguous().t()  # stored with other strides
dcp.save(state, checkpoint_id=sys.argv[1])
dist.destroy_process_group()
"""


@pytest.fixture
def worker(muster: str, release_build: Path, run: Callable[..., str]) -> Callable[..., str]:
    """Runs tests/torch/sharded_worker.cpp at `ranks` ranks."""
    program = release_build / "tests/torch/sharded_worker"

    def start(ranks: int, action: str, folder: Path) -> str:
        return run([muster, "run", "--nproc-per-node", str(ranks), "--no-python", program, action, folder])

    return start


@pytest.mark.parametrize("ranks", [1, 3])
def test_python_loads_what_cpp_saves(worker: Callable[..., str], tmp_path: Path, ranks: int) -> None:
    worker(ranks, "save", tmp_path / "step")
    expected, state = tensors(), tensors()
    for value in (state["table"], state["note"], state["bias"], *state["layer"].values()):
        value.zero_()
    state["step"] = 0
    dcp.load(state, checkpoint_id=tmp_path / "step", no_dist=True)
    assert state["step"] == STEP
    assert torch.equal(state["layer"]["weight"], expected["layer"]["weight"])  # the bias has random values
    for name in ("table", "note", "bias"):
        assert torch.equal(state[name], expected[name]), name


def test_cpp_loads_what_cpp_saves_at_other_ranks(worker: Callable[..., str], tmp_path: Path) -> None:
    worker(3, "save", tmp_path / "step")
    assert worker(2, "load", tmp_path / "step").count("loaded") == 2


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cpp_loads_what_python_saves(
    worker: Callable[..., str], muster: str, run: Callable[..., str], tmp_path: Path, ranks: int
) -> None:
    script = tmp_path / "save.py"
    script.write_text(SAVE)
    words = [muster, "run", "--nproc-per-node", "2", script, tmp_path / "step", Path(__file__).parent]
    run(words, env={"MUSTER_PYTHON": sys.executable})
    assert worker(ranks, "load", tmp_path / "step").count("loaded") == ranks
