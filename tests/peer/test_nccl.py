"""PyTorch's tests of its backend for NCCL, over muster with two ranks, on the device and over the NCCL of the tests.

PyTorch's wheel does not have them: MUSTER_PYTORCH names a folder with PyTorch's source (test_gloo.py).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

FILE = Path(os.environ.get("MUSTER_PYTORCH", "missing"), "test/distributed/test_c10d_ops_nccl.py")
TESTS = Path(__file__).resolve().parents[1]
BUILD = Path(os.environ.get("MUSTER_BUILD_DIR", TESTS.parent / "build/release"))
MIN_PASSED = 24

pytestmark = pytest.mark.skipif(not FILE.is_file(), reason=f"MUSTER_PYTORCH names no folder with {FILE.name} in it")


def test_torchs_tests_for_nccl_pass() -> None:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "python")]),
        "OMP_NUM_THREADS": "1",
        "MUSTER_NCCL_LIBRARY": str(BUILD / "tests/nccl/libfake_nccl.so"),
    }
    command = ["muster", "run", "--nproc-per-node", "2", "-m", "peer.nccl_rank", str(FILE)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    from peer import rank_results  # imports torch

    assert len(rank_results.passed(done.stdout)) >= MIN_PASSED
