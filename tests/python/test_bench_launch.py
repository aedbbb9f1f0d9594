"""Tests that `muster bench launch` starts, kills and times what it says. Never checks the measured values."""

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from launching import marked_processes
from muster.bench import launch
from muster.bench.__main__ import main

# Starts as the real worker does, but forms no group: importing torch takes seconds and is not tested here.
WORKER = """
import os, signal, sys, time
backend, folder, stay = sys.argv[1:]
attempt = os.environ['TORCHELASTIC_RESTART_COUNT']
name = f"{folder}/{attempt}.{os.environ['RANK']}"
with open(name + '.new', 'w') as file:
    file.write(f'{time.monotonic()} {os.getpid()} 1024')
os.rename(name + '.new', name)
while stay == '1' and attempt == '0':
    signal.pause()
"""

# Replaces torchrun.
RUN = """
import os, sys
os.execv(os.environ['MUSTER_BIN'], ['muster', 'run', '--start-method=spawn', *sys.argv[1:]])
"""


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch, muster: str, tmp_path: Path) -> str:
    """Gives children of this process a torch package with only a torchrun. Returns a mark in their environment."""
    package = tmp_path / "modules/torch/distributed"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("def set_num_threads(count): pass\n")
    (package / "__init__.py").touch()
    (package / "run.py").write_text(RUN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setenv("MUSTER_BIN", muster)
    monkeypatch.setenv("MUSTER_TEST_MARK", str(tmp_path))
    monkeypatch.setattr(launch, "WORKER", WORKER)
    return f"MUSTER_TEST_MARK={tmp_path}"


def test_every_start_method_is_timed_with_torchrun(without_torch: str, tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    assert main(["launch", "--quick", "--workers", "2", "--json", str(rows_file)]) == 0
    rows = {(row["case"], row["metric"]): row for row in json.loads(rows_file.read_text())}
    starts = [f"command to first barrier, {how}" for how in ("cold", "muster warm", "--start-method spawn")]
    for case in (*starts, "SIGKILL of one worker to next barrier"):
        row = rows.pop((case, "time"))
        assert row["ranks"] == 2 and min(row["muster"], row["peer"], row["floor"]) > 0, row
        assert row["ratio"] == pytest.approx(row["peer"] / row["muster"])
    assert {row["metric"] for row in rows.values()} == {"PSS"}
    assert {row["muster"] for row in rows.values()} == {1.0}
    assert marked_processes(without_torch) == []


def test_the_users_warm_zygote_is_not_used(
    without_torch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, muster: str
) -> None:
    temporary = tmp_path / ("temporary" * 10)  # a socket's path has at most 108 bytes
    temporary.mkdir()
    asked = tmp_path / "asked"
    said_by = tmp_path / "muster"
    said_by.write_text(f'#!/bin/sh\necho "$XDG_RUNTIME_DIR" >> {asked}\nexec {muster} "$@"\n')
    said_by.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("MUSTER_BIN", str(said_by))
    assert main(["launch", "--quick", "--workers", "2"]) == 0
    (runtime,) = set(asked.read_text().splitlines())
    assert len(f"{runtime}/muster/") + 32 < 108, "or /tmp/muster-UID is taken"
    assert marked_processes(without_torch) == []


def test_memory_is_the_median_of_the_repeats() -> None:
    class Bench:
        variants = dict.fromkeys(("torchrun", "zygote", "warm", "spawn"))
        shares = iter([1] * 4 + [2] * 4 + [9] * 4)

        def start(self, variant: None) -> tuple[float, list[launch.Passed]]:
            return 0, [launch.Passed(1, 1, next(self.shares) * 2**20)]

        def row(self, case: str, metric: str, *values: object) -> tuple[object, ...]:
            return (metric, *values)

        def import_time(self) -> float:
            return 1

        fork_time = import_time

    rows: list[Any] = list(launch._starts(Bench(), 3))  # type: ignore[arg-type]
    assert [row for row in rows if row[0] == "PSS"] == [("PSS", "MiB", 2, 2, 0)] * 2


def test_a_launcher_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_END_TIMEOUT", 0.1)
    ignores_sigterm = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", ignores_sigterm], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        launch._end(process)
        assert process.returncode == -signal.SIGKILL


def test_a_failed_job_is_reported_with_its_output(
    without_torch: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "WORKER", "raise SystemExit('no barrier today')")
    assert main(["launch", "--quick", "--workers", "2"]) == 1
    output = capsys.readouterr().err
    assert "ended too early" in output and "no barrier today" in output
    assert marked_processes(without_torch) == []
    assert "--nproc-per-node=2" in output, "the command of the launcher that failed"
