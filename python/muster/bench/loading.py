"""Runs the C++ load generator."""

from __future__ import annotations

import json
import os
import subprocess

from muster.bench.report import BenchFailedError
from muster.bench.servers import LOAD, find_program

Figures = dict[str, float]


def load(words: list[str], secret: str = "") -> Figures:
    """What one measurement gave; times in seconds."""
    done = subprocess.run(
        [find_program(LOAD), *words], env=os.environ | {"MUSTER_SECRET": secret}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise BenchFailedError((done.stderr.strip().splitlines() or [f"{words[0]} ended with {done.returncode}"])[-1])
    figures: Figures = json.loads(done.stdout)
    return figures
