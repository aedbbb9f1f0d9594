"""Tests what `muster bench rpc` prints and rejects. Never checks measured values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_programs import bench, needs

pytestmark = [pytest.mark.slow, needs("muster-rpc-load")]


def test_each_case_has_a_row(tmp_path: Path) -> None:
    done = bench("rpc", "--quick", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    cases = [row["case"] for row in rows]
    assert cases[:2] == ["50 endpoints start", "50 endpoints call all others"]
    assert cases[2] == "tiny call" and "calls, 256 in flight" in cases and "memory, 1000 calls in flight" in cases
    assert {"1000 in flight, median", "1000 in flight, 99th percentile"} <= set(cases)
    assert "echo of 64 MiB" in cases and "C++: backward, there and back" in cases
    assert all(row["muster"] > 0 for row in rows)
    assert all(row["floor"] > 0 for row in rows if row["unit"] == "us")


def test_an_unknown_transport_is_reported() -> None:
    done = bench("rpc", "--quick", "--transports", "udp")
    assert done.returncode != 0
    assert "'udp' is not a transport" in done.stderr
