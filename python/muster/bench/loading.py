"""Runs the C++ load generator."""

from __future__ import annotations

import json
import os
import subprocess
from typing import NamedTuple

import torch

from muster._programs import find_program
from muster.bench.report import BenchFailedError, Row
from muster.bench.servers import LOAD

Figures = dict[str, float]


class Metric(NamedTuple):
    """The name and unit of a figure of the load generator in a table, and the factor that converts the figure."""

    shown: str
    unit: str
    factor: float = 1.0


def load(words: list[str], secret: str = "") -> Figures:
    """Runs one measurement. Times are in seconds."""
    done = subprocess.run(
        [find_program(LOAD), *words], env=os.environ | {"MUSTER_SECRET": secret}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise BenchFailedError((done.stderr.strip().splitlines() or [f"{words[0]} ended with {done.returncode}"])[-1])
    figures: Figures = json.loads(done.stdout)
    return figures


def row_beside_torch(
    bench: str, case: str, ranks: int, metric: Metric, muster: float, peer: float, floor: float = 0
) -> Row:
    """Returns a row for figures of the load generator. More is better for rates only. 0: not measured."""
    muster, peer, floor = (metric.factor * figure for figure in (muster, peer, floor))
    peer_name = f"torch {torch.__version__.partition('+')[0]}"
    ratio = -1 if metric.shown != "rate" else muster / peer if peer else 0
    return Row(bench, case, ranks, metric.shown, metric.unit, muster, peer, peer_name, floor, ratio)
