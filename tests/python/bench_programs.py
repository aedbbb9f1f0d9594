"""Runs benchmarks that need a program of the build folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("MUSTER_BUILD_DIR", ROOT / "build/release")) / "src/muster/cli"


def needs(program: str) -> pytest.MarkDecorator:
    """Skips a test if the program is not built."""
    return pytest.mark.skipif(not (FOLDER / program).exists(), reason=f"{program} is not built")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "muster.bench", *arguments],
        env=os.environ | {"MUSTER_BIN": str(FOLDER / "muster")},
        capture_output=True,
        text=True,
        timeout=300,
    )
