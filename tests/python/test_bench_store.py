"""Tests what `muster bench store` and `muster bench startup-load` print and reject. Never checks measured values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_programs import bench, needs
from muster.bench.__main__ import main

pytestmark = needs("muster-store-load")


def test_cases_are_measured_with_torch_and_the_floor(tmp_path: Path) -> None:
    done = bench(
        *("store", "--quick", "--cases", "add,multi_get,barrier,killed", "--connections", "4"),
        *("--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")),
        *("--markdown", str(tmp_path / "rows.md")),
    )
    assert done.returncode == 0, done.stderr
    header, *lines, drawn = done.stdout.splitlines()
    assert header.split()[:4] == ["case", "ranks", "metric", "muster"]
    assert len({len(line) for line in (header, *lines)}) == 1, "columns are aligned"
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == len(lines)
    assert len((tmp_path / "rows.md").read_text().splitlines()) == 2 + len(rows)
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


def test_tiers_reduce_the_messages_of_the_root(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    files = ("--json", str(rows_file), "--plot", str(tmp_path / "rows.png"))
    done = bench("startup-load", "--quick", "--workers", "32", "--loads", "64", "--fanout", "4", *files)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    rows = {(row["case"], row["metric"]): row for row in json.loads(rows_file.read_text())}
    for case in ("start-up, full mesh", "start-up, peers at powers of 2", "load, ring and tree"):
        tiers, direct = (rows[f"{case}, {how}", "root messages"] for how in ("tiers", "no tiers"))
        assert tiers["muster"] < direct["muster"] / 2
        # Without tiers, muster's server and torch's get the same requests, and muster counts as many as the generator
        # sends.
        assert direct["muster"] == pytest.approx(direct["peer"], rel=0.05)
    assert ("load, ring and tree, middle tier", "root CPU") in rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["store", "--cases", "sort"], "--cases takes connect, set, get"),
        (["store", "--connections", "1,none"], "--connections takes numbers from 1 on"),
        (["startup-load", "--workers", "8,1"], "--workers takes numbers from 2 on"),
        (["storm", "--storms", "many"], "--loads takes numbers from 2 on, as in 2,4; not 'many'"),
    ],
)
def test_wrong_options_name_valid_ones(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_missing_load_generator_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MUSTER_BIN", str(tmp_path / "muster"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["store", "--quick", "--cases", "add"]) == 1
    assert "there is no program muster-store-load beside" in capsys.readouterr().err
