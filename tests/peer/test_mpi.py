"""PyTorch's distributed_test.py over muster-mpi: its tests for MPI, with 3 ranks."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from mpi_launchers import Launcher, launcher, run_program

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
    lines = re.findall(r'^{"test": .*}$', done.stdout, re.MULTILINE)
    results = [json.loads(line) for line in lines]
    failed = [each for each in results if each["result"] == "failed"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert not failed, "\n".join(f"{each['test']}, rank {each['rank']}: {each['text']}" for each in failed)
    counts = Counter(each["result"] for each in results if each["rank"] == 0)
    assert counts["passed"] >= MIN_PASSED, counts
