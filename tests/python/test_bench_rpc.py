"""Tests what `muster bench rpc` prints and rejects. Never checks measured values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BESIDE = Path(os.environ.get("MUSTER_BUILD_DIR", ROOT / "build/release")) / "src/muster/cli"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BESIDE / "muster-rpc-load").exists(), reason="muster-rpc-load is not built"),
]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "muster.bench", *arguments],
        env=os.environ | {"MUSTER_BIN": str(BESIDE / "muster")},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_each_case_has_a_row(tmp_path: Path) -> None:
    done = bench("rpc", "--quick", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    cases = [row["case"] for row in rows]
    assert cases[0] == "tiny call" and "calls, 256 in flight" in cases and "echo of 64 MiB" in cases
    assert all(row["muster"] > 0 for row in rows)
    assert all(row["floor"] > 0 for row in rows if row["unit"] == "us")


def test_an_unknown_transport_is_reported() -> None:
    done = bench("rpc", "--quick", "--transports", "udp")
    assert done.returncode != 0
    assert "'udp' is not a transport" in done.stderr
