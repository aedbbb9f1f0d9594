"""Tests what `muster bench ddp` trains, counts and prints. Never checks the measured values."""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import signal
import subprocess
import sys
import unittest.mock
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import CONTEXT, Process
from hosts import require
from launching import TIMEOUT
from muster.bench import ddp
from muster.bench.__main__ import main
from muster.bench.ddp_models import MODELS
from muster.bench.ddp_training import measure
from muster.bench.groups import Groups
from muster.bench.namespaces import INTERFACE, two_nodes
from ranks import run_ranks

ROUNDS = 2


def test_a_quick_run_writes_rows_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_file, picture, table = tmp_path / "rows.json", tmp_path / "ddp.png", tmp_path / "rows.md"
    words = ["ddp", "--quick", "--models", "tiny", "--parts", "steps", "--json", str(rows_file)]
    assert main([*words, "--plot", str(picture), "--markdown", str(table)]) == 0
    header, *lines, _ = capsys.readouterr().out.splitlines()
    columns = "case ranks metric muster gloo ratio floor stock DP torch DP"
    assert header.split() == columns.split()
    step, exposed = json.loads(rows_file.read_text())
    assert len(lines) == 2
    assert [(row["case"], row["ranks"], row["metric"]) for row in (step, exposed)] == [
        ("tiny", 2, "step"),
        ("tiny", 2, "exposed"),
    ]
    for row in (step, exposed):
        assert min(row["muster"], row["peer"], row["floor"], row["also"]["stock"]) > 0
        assert row["ratio"] == pytest.approx(row["peer"] / row["muster"])
    assert min(step["also"]["DP"], step["also"]["torch DP"]) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "stock" in table.read_text().splitlines()[0]


def measured(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    (result,) = measure(Groups(timedelta(seconds=60)), {"model": "tiny", "rounds": ROUNDS, **options})
    return result


def test_every_rank_measures_the_same() -> None:
    hooks = [("muster", "float32"), ("gloo", "fp16")]
    (first, second) = run_ranks(2, measured, {"part": "hooks", "hooks": hooks}, backend="gloo")
    assert first == second
    assert list(first["step"]) == ["muster float32", "gloo fp16", "bare"]
    assert min(first["step"].values()) > 0


def test_one_rank_has_an_overhead() -> None:
    (result,) = run_ranks(1, measured, {"part": "alone", "variants": ddp.VARIANTS}, backend="gloo")
    assert set(result["overhead"]) == set(ddp.VARIANTS)
    assert all(math.isfinite(share) for share in result["overhead"].values())


def test_memory_is_measured_during_training() -> None:
    results = run_ranks(2, measured, {"part": "memory", "variants": ["muster"]}, backend="gloo")
    assert results[0] == results[1]
    # The memory of the model and its gradients. Memory that ranks share is counted once.
    assert results[0]["peak"] > results[0]["base"] > 0


@pytest.mark.parametrize(("name", "parameters"), [("mlp", 25e6), ("transformer", 10e6), ("resnet18", 11.2e6)])
def test_models_have_the_documented_size(name: str, parameters: float) -> None:
    with torch.device("meta"):
        model = MODELS[name].make()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(parameters, rel=0.01)


def test_models_accept_their_batches() -> None:
    for case in (MODELS["resnet18"], MODELS["transformer"], MODELS["tiny"]):
        inputs, targets = case.batch()
        assert len(case.make()(inputs)) == len(targets)


def test_network_has_the_requested_rate() -> None:
    require()
    with two_nodes("1gbit") as nodes:
        for node in nodes:
            command = ["tc", "-n", node.namespace, "qdisc", "show", "dev", INTERFACE]
            assert "tbf" in (shown := subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            assert "rate 1Gbit" in shown


def test_wire_time_follows_the_rate() -> None:
    assert ddp.wire_time(144_800_000, "1.2112gbit") == pytest.approx(1)
    assert ddp.wire_time(1448, "12112bit") == pytest.approx(1)
    assert ddp.wire_time(1448, "24.224kbit") == pytest.approx(0.5)
    assert ddp.wire_time(1, "1MiBps") == 0, "not known"


def hold_a_network(made: Connection) -> None:
    """`muster bench ddp --network`, stopped before its first row."""

    def run(arguments: argparse.Namespace, model: str) -> Iterator[Any]:
        with two_nodes() as nodes:
            made.send([node.namespace for node in nodes])
            while True:
                select.select([], [], [], 0.1)
        yield  # makes this a generator, like the function that it replaces

    with unittest.mock.patch.dict(ddp._RUNS, network=run):
        sys.exit(main(["ddp", "--network", "--models", "tiny"]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_removes_the_network(number: signal.Signals) -> None:
    require()
    here, there = CONTEXT.Pipe()
    process = Process(target=hold_a_network, args=(there,))
    process.start()
    try:
        assert here.poll(TIMEOUT)
        namespaces = here.recv()
        assert len(namespaces) == 2
        os.kill(process.pid, number)
        process.join(TIMEOUT)
    finally:
        process.kill()
    assert process.exitcode == 128 + number
    assert not [name for name in namespaces if Path("/run/netns", name).exists()]


def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ddp", "--models", "vgg"]) == 2
    assert "--models takes mlp, transformer, resnet18, tiny; not 'vgg'" in capsys.readouterr().err
    assert main(["ddp", "--ranks", "1"]) == 2
