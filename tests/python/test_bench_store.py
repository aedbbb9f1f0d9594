"""`muster bench store`: what it prints and refuses. Never what it measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BESIDE = Path(os.environ.get("MUSTER_BUILD_DIR", ROOT / "build/release")) / "src/muster/launch"
pytestmark = pytest.mark.skipif(not (BESIDE / "muster-store-load").exists(), reason="muster-store-load is not built")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "muster.bench", "store", *arguments],
        env=os.environ | {"MUSTER_BIN": str(BESIDE / "muster")},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_cases_are_measured_beside_torch_and_the_floor(tmp_path: Path) -> None:
    done = bench(
        *("--quick", "--cases", "add,multi_get,barrier,killed", "--connections", "4"),
        *("--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")),
    )
    assert done.returncode == 0, done.stderr
    header, *lines, drawn = done.stdout.splitlines()
    assert header.split()[:5] == ["case", "ranks", "metric", "unit", "muster"]
    assert len({len(line) for line in (header, *lines)}) == 1, "columns are aligned"
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == len(lines)
    measured = {(row["case"], row["metric"]) for row in rows}
    assert {("add", "rate"), ("add", "p99"), ("barrier of all", "time")} <= measured
    assert ("all waiting are killed", "server CPU") in measured
    for row in rows:
        assert row["ranks"] == 4
        assert row["peer_name"].startswith("torch ")
        assert min(row["muster"], row["peer"], row["floor"]) > 0, row
        better = row["muster"] / row["peer"] if row["metric"] == "rate" else row["peer"] / row["muster"]
        assert row["ratio"] == pytest.approx(better)
    assert drawn == f"drawn: {tmp_path / 'rows.png'}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cases", "sort"], "--cases takes connect, set, get"),
        (["--connections", "1,none"], "--connections takes numbers from 1 on"),
    ],
)
def test_wrong_options_say_what_they_take(arguments: list[str], says: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_load_generator_that_is_missing_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "muster.bench", "store", "--quick", "--cases", "add"],
        env=os.environ | {"MUSTER_BIN": str(tmp_path / "muster"), "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "there is no muster-store-load beside muster" in done.stderr
