"""Tensors on a device without a collective library. tests/torch/device_double stands for the device."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("device_program.py")


@pytest.mark.parametrize("function", ["torchs_calls", "streams", "two_devices", "ddp", "groups", "errors", "died"])
def test_tensors_on_a_device(function: str, built_programs: Callable[..., Path]) -> None:
    command = ["muster", "run", "--nproc-per-node", "3", str(PROGRAM), function]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
