"""PyTorch's distributed_test.py over muster-mpi: its tests for MPI, with 3 ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mpi_launchers import Launcher, launcher, run_program

from peer import rank_results
from peer.conftest import SKIPPED

__all__ = ["launcher"]  # a fixture
TESTS = Path(__file__).resolve().parents[1]
RANKS = 3
MIN_PASSED = 95


@pytest.mark.slow
def test_torchs_tests_for_mpi_pass(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "test_dir").mkdir()  # for the locks of these tests
    env = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "python")]), "TEMP_DIR": str(tmp_path)}
    others = f"(?!({'|'.join(SKIPPED['test_distributed.py'])})$).*"
    done = run_program(launcher, "-m", "peer.mpi_rank", others, ranks=RANKS, env=env, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(rank_results.passed(done.stdout)) >= MIN_PASSED
