"""Tests what `muster bench mpi` and `muster bench network` print and reject. Never checks the measured values."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bench_programs import needs
from hosts import require
from muster.bench import jobs, network
from muster.bench.__main__ import main
from muster.bench.report import BenchFailedError, write_markdown

pytestmark = pytest.mark.usefixtures("built_programs")


def measured(words: list[str], tmp_path: Path) -> list[dict[str, Any]]:
    assert main([*words, "--quick", "--json", str(tmp_path / "rows.json")]) == 0
    rows: list[dict[str, Any]] = json.loads((tmp_path / "rows.json").read_text())
    return rows


@needs(jobs.PROGRAM)
def test_load_program_exits_with_its_driver(tmp_path: Path) -> None:
    with jobs.running(["muster"], 2, tmp_path, 60) as running:
        job = running["muster"]
        assert job.ask("prepare", "all_gather", 10, 1, 3, "ordinary") == ["16", "16"]  # two blocks of whole elements
        assert all(float(seconds) > 0 for seconds in job.ask("run", "all_gather", 10, 1000, 3, "-"))
        processes = list(job.processes)
    assert [process.returncode for process in processes] == [0, 0]


@needs(jobs.PROGRAM)
def test_a_dead_rank_is_named_and_no_process_is_left(tmp_path: Path) -> None:
    with pytest.raises(BenchFailedError, match="muster"), jobs.running(["muster"], 2, tmp_path, 60) as running:
        processes = list(running["muster"].processes)
        processes[1].send_signal(signal.SIGKILL)
        processes[1].wait()
        running["muster"].ask("run", "barrier", 0, 1, 1, "-")
    assert None not in [process.returncode for process in processes]


@pytest.mark.parametrize("mpi", jobs.MPIS)
def test_muster_and_mpi_are_measured_together(mpi: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["mpi", "--vs", mpi, "--ranks", "2", "--sizes", "8", "--ops", "all_reduce,barrier"]
    if not jobs.available(mpi):
        assert main(words) == 1
        assert "no MPI was found" in capsys.readouterr().err
        pytest.skip(f"{mpi} is not installed")
    rows = measured(words, tmp_path)
    assert [(row["case"], row["bytes"]) for row in rows] == [("all_reduce", 8), ("barrier", 0)]
    for row in rows:
        assert row["also"][mpi] == row["peer"]
        assert row["also"]["unrecorded"] > 0
        assert row["ratio"] == pytest.approx(row["peer"] / row["muster"])


def test_bytes_between_two_nodes_are_counted(tmp_path: Path) -> None:
    require()
    words = ["network", "--ops", "all_reduce", "--sizes", "8", "--crossing", "256Ki", "--local", "1"]
    time, sent = measured(words, tmp_path)
    assert (time["metric"], sent["metric"]) == ("time", "sent across")
    assert time["muster"] > 0 and time["peer"] > 0
    # No measurement is below the bound, because two ranks must send their data to sum it.
    assert sent["floor"] == 256
    assert sent["muster"] >= 256 and sent["peer"] >= 256
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"musterbench{os.getpid()}" not in left


def test_network_rate_per_connection(tmp_path: Path) -> None:
    require()
    words = ["network", "--ops", "all_reduce", "--sizes", "1Mi", "--crossing", "", "--local", "1"]
    one, three = measured([*words, "--connection-rate", "200mbit", "--streams", "1,3"], tmp_path)
    assert (one["case"], three["case"]) == (
        "all_reduce, 1 MiB, 2 nodes of 1",
        "all_reduce, 1 MiB, 2 nodes of 1, 3 streams",
    )
    assert min(one["muster"], one["peer"], three["muster"], three["peer"]) > 0
    assert (one["note"], three["note"]) == ("", "")


def test_lower_bound_of_bytes_between_nodes() -> None:
    result = {"op": "all_to_all_single", "bytes": 4096, "sent": {"muster": 8192, "gloo": 8192}, "notes": {}}
    row = network._bytes_row(2, "2 nodes of 2", "gloo", result)
    # Each of the node's two ranks sends half of its 4 KiB to the other node.
    assert (row.muster, row.floor, row.unit) == (8.0, 4.0, "KiB")


def test_network_rows_have_a_bus_bandwidth(tmp_path: Path) -> None:
    result = {"op": "all_gather_into_tensor", "bytes": 4 << 20, "seconds": {"muster": 1e-3, "gloo": 2e-3}, "notes": {}}
    row = network._time_row(2, "2 nodes of 2", "gloo", result)
    # Each of 4 ranks receives three quarters from other ranks.
    assert row.busbw == pytest.approx(3 * 2**20 / 1e6)
    write_markdown(tmp_path / "rows.md", [row])
    names, _, cells = (tmp_path / "rows.md").read_text().splitlines()
    assert names.endswith("| busbw GB/s | note |")
    assert cells.endswith("| 3.15 |  |")
