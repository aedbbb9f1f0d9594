"""Tests what `muster bench graph` runs and prints. Never checks the measured values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hosts import require
from muster.bench.__main__ import main
from muster.bench.graph import OTHERS, OURS, THEIRS, gather_rows
from muster.bench.report import ALSO

pytestmark = pytest.mark.usefixtures("built_programs")


def test_small_reductions_make_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert main(["graph", "--quick", "--parts", "small", "--ranks", "2", "--json", str(path)]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert all(name in header for name in ("muster", "gloo", *ALSO["graph"]))
    (row,) = json.loads(path.read_text())
    assert row["case"] in line
    assert min(row["muster"], row["peer"], row["floor"], *row["also"].values()) > 0
    assert row["ratio"] == pytest.approx(row["peer"] / row["muster"])


def test_packages_make_a_row_each(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    words = ["graph", "--quick", "--parts", "calls,norms,perceptron,decoder", "--ranks", "2", "--width", "128"]
    assert main([*words, "--json", str(path)]) == 0
    calls, norms, perceptron, decoder = json.loads(path.read_text())
    for row in calls, norms, perceptron, decoder:
        assert min(row["muster"], row["peer"], row["floor"], *row["also"].values()) > 0
        assert {"eager gloo", "eager muster"} <= row["also"].keys() <= set(ALSO["graph"])
    assert perceptron["ratio"] == pytest.approx(perceptron["peer"] / perceptron["muster"])
    assert decoder["ratio"] == pytest.approx(decoder["muster"] / decoder["peer"])


def over_network(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    require()
    path = tmp_path / "rows.json"
    assert main(["graph", "--quick", *words, "--json", str(path)]) == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def test_layers_over_a_network_make_rows(tmp_path: Path) -> None:
    step, *_ = over_network(tmp_path, "--parts", "gather", "--side", "64", "--batch", "8")
    assert min(step["muster"], step["peer"], step["floor"], *step["also"].values()) > 0
    assert set(step["also"]) == set(OTHERS)


# 8 MB and their headers take 64 ms; the layers alone take 64 ms, too. At best all but an eighth of that is hidden.
@pytest.mark.parametrize(("overlapped", "shares"), [(64, [100, 0]), (100, [200, 0]), (128, None), (140, None)])
def test_the_second_row_says_what_share_is_hidden(overlapped: float, shares: list[float] | None) -> None:
    steps = dict.fromkeys(OTHERS, 128.0) | {OURS: 72.0, THEIRS: 128.0, "bare": 64.0, "overlapped": float(overlapped)}
    step, *hidden = gather_rows(steps, 16_000_000, f"{1514 / 1448}gbit")
    assert (step.muster, step.peer, step.floor) == pytest.approx((72.0, 128.0, max(72.0, overlapped)))
    assert [row.unit for row in hidden] == (["%"] if shares else [])
    for row in hidden:
        assert [row.muster, row.peer] == pytest.approx(shares, abs=1e-6)


def test_tensor_parallel_blocks_make_a_row(tmp_path: Path) -> None:
    (row,) = over_network(tmp_path, "--parts", "blocks", "--side", "64", "--batch", "8")
    assert min(row["muster"], row["peer"], row["floor"], *row["also"].values()) > 0
    assert set(row["also"]) == set(OTHERS)


def test_compiling_makes_a_row(tmp_path: Path) -> None:
    (row,) = over_network(tmp_path, "--parts", "compile", "--side", "64", "--batch", "8")
    assert min(row["muster"], row["peer"], *row["also"].values()) > 0
    assert row["also"].keys() == {"inductor muster", "muster gloo"}


def test_models_make_a_row_each(tmp_path: Path) -> None:
    rows = over_network(tmp_path, "--parts", "layouts", "--models", "words,perceptron-sharded")
    assert [row["case"].partition(",")[0] for row in rows] == ["words", "perceptron-sharded"]
    for row in rows:
        assert min(row["muster"], row["peer"], row["floor"], *row["also"].values()) > 0
        assert row["bytes"] > 0


def test_training_over_a_network_makes_a_row(tmp_path: Path) -> None:
    (row,) = over_network(tmp_path, "--parts", "ddp", "--side", "64", "--batch", "8")
    assert min(row["muster"], row["peer"], row["floor"], *row["also"].values()) > 0
    assert row["also"].keys() == {"inductor muster", "eager muster", "eager gloo"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "large"], "--parts"),
        (["--models", "huge"], "--models"),
        (["--ranks", "1"], "--ranks takes numbers from 2 on"),
        (["--width", "192"], "--width takes a multiple of 128"),
        (["--rate", "fast"], "--rate takes a rate as tc writes it"),
    ],
)
def test_wrong_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", *words]) != 0
    assert message in capsys.readouterr().err
